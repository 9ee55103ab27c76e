// Memory for weights and the KV cache, and how much of it there is.
#pragma once

#include "backend/backend.h"

namespace tiny_vllm {

// What the process may use: the machine's memory, or less where a cgroup says so.
MemoryInfo host_memory();

// 64-byte aligned, contents undefined. Large ones are aligned to 2 MiB and ask the kernel for huge pages: a core that
// streams through weights in pages of 4 KiB spends much of its time looking up where the next page is.
// Throws OutOfMemoryError, with both numbers, when more is wanted than is available.
Buffer allocate_host(int64_t bytes);

}  // namespace tiny_vllm
