// The CPU backend, for the factory and for benchmarks; everything else knows only backend.h.
#pragma once

#include <memory>

#include "backend/backend.h"

namespace tiny_vllm {

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options);

// How fast this machine reads memory with that many threads, in GB/s (10^9 bytes): the ceiling of decoding, which must
// read every weight once a token. Reads a buffer of `bytes` (more than the caches hold) a few times, best one counts.
double measure_read_bandwidth(int num_threads, int64_t bytes);

}  // namespace tiny_vllm
