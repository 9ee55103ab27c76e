// How kernels are launched: with their launch status checked, and from Hopper on so that the next kernel may start
// while this one drains (programmatic dependent launch). Such a kernel does what does not depend on its predecessor
// first, and then calls wait_for_previous_kernel().
#pragma once

#include <nvtx3/nvToolsExt.h>

#include <utility>

#include "cuda_check.h"
#include "kernel_timer.h"

namespace tiny_vllm {

struct Stream {
  cudaStream_t handle = nullptr;
  bool dependent_launch = false;  // compute capability 9.0 and newer
  bool has_wgmma = false;         // compute capability 9.0, and code for 9.0a in this build
  int num_sms = 0;
  KernelTimer* timer = nullptr;  // when every launch is to be timed; dependent_launch is false then
};

// Every kernel calls this before it touches memory that another kernel wrote or reads, even if it does not care: the
// wait is also what keeps a kernel from overtaking its predecessor's predecessor.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// The next kernel may be put on multiprocessors as soon as all blocks have said this, or ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// A named stretch of time on the host, for profilers (nsys.sh). Without one it costs next to nothing.
class ProfilerRange {
 public:
  explicit ProfilerRange(const char* name) { nvtxRangePushA(name); }
  ~ProfilerRange() { nvtxRangePop(); }
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

// Calls put_into_stream(), which launches `work`, in sight of the profilers.
template <typename Fn>
void profiled(const Stream& stream, const KernelWork& work, Fn&& put_into_stream) {
  const ProfilerRange range(work.name);
  if (stream.timer) stream.timer->start(stream.handle, work);
  put_into_stream();
  if (stream.timer) stream.timer->stop(stream.handle);
}

template <typename... Params, typename... Args>
void launch(const Stream& stream, const KernelWork& work, void (*kernel)(Params...), dim3 blocks, int threads,
            size_t shared_bytes, Args&&... args) {
  if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0) return;  // nothing to do is not an error
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream.handle;
  config.attrs = &attribute;
  config.numAttrs = stream.dependent_launch ? 1 : 0;
  profiled(stream, work, [&] {
    check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(std::forward<Args>(args))...), work.name);
  });
}

}  // namespace tiny_vllm
