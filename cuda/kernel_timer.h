// Times every kernel of an engine with CUDA events, for BackendOptions::profile: what a profiler would show, where
// there is none.
//
// An event is a timestamp that the GPU writes when it comes to it in the stream. One is recorded before each launch and
// one after it. The difference holds the kernel and its start, about a microsecond, which counts for small kernels.
//
// The GPU must not catch up with the host: it would write the first timestamp and then wait for the launch, and the
// wait would look like the kernel's time. So begin_step() holds the stream until release(), when the host has put all
// launches of the step into it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "backend/kernel_record.h"

namespace tiny_vllm {

// What a launch is called and has to do: bytes that must move between the GPU's memory and its multiprocessors, and
// floating-point operations on tensor cores. 0: not stated. A name alone will do.
struct KernelWork {
  KernelWork(const char* name_of_kernel, int64_t bytes_moved = 0, int64_t operations = 0)  // NOLINT: implicit
      : name(name_of_kernel), bytes(bytes_moved), flops(operations) {}
  const char* name;  // lives as long as the program
  int64_t bytes, flops;
};

class KernelTimer {
 public:
  KernelTimer();
  ~KernelTimer();
  KernelTimer(const KernelTimer&) = delete;
  KernelTimer& operator=(const KernelTimer&) = delete;

  // What follows belongs to the next step, of this many tokens, and starts after release().
  void begin_step(cudaStream_t stream, int64_t tokens);
  // Before each wait of the host for the stream.
  void release();

  // Around one launch.
  void start(cudaStream_t stream, const KernelWork& work);
  void stop(cudaStream_t stream);

  // All since the last call, in order. Waits for them.
  std::vector<KernelRecord> take();

 private:
  struct Launch {
    KernelWork work;
    int64_t step, tokens;
    cudaEvent_t start, stop;
  };

  cudaEvent_t event();
  void collect();

  std::vector<cudaEvent_t> pool_;  // not in use
  std::vector<Launch> launches_;   // whose events have not been read; of the last, `stop` may not be recorded
  bool started_ = false;           // that is so
  cudaEvent_t last_stop_ = nullptr;
  double last_stop_us_ = 0;
  std::vector<KernelRecord> records_;
  int64_t step_ = 0, tokens_ = 0;
  volatile int64_t* released_ = nullptr;  // pinned: the last step that may run. The GPU reads it.
};

}  // namespace tiny_vllm
