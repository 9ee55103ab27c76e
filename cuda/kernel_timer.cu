#include "kernel_timer.h"

#include <utility>

#include "cuda_check.h"

namespace tiny_vllm {
namespace {

// Nothing is lost when the host waits for the stream and forgot to release it: the kernels of that step begin this much
// later. (The first launch of a kernel may wait too, while the driver loads its code.)
constexpr uint64_t kLongestHold = 20'000'000;  // nanoseconds

__device__ uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__global__ void hold_kernel(const volatile int64_t* released, int64_t step) {
  const uint64_t start = nanoseconds();
  while (*released < step && nanoseconds() - start < kLongestHold) {
  }
}

double microseconds(cudaEvent_t from, cudaEvent_t to) {
  float ms = 0;
  TV_CUDA(cudaEventElapsedTime(&ms, from, to));
  return 1e3 * static_cast<double>(ms);
}

}  // namespace

KernelTimer::KernelTimer() {
  void* memory = nullptr;
  TV_CUDA(cudaMallocHost(&memory, sizeof(int64_t)));
  released_ = static_cast<volatile int64_t*>(memory);
  *released_ = 0;
}

KernelTimer::~KernelTimer() {
  release();
  cudaDeviceSynchronize();  // hold_kernel reads what is freed here
  for (const Launch& launch : launches_) {
    cudaEventDestroy(launch.start);
    cudaEventDestroy(launch.stop);
  }
  for (cudaEvent_t e : pool_) cudaEventDestroy(e);
  if (last_stop_) cudaEventDestroy(last_stop_);
  cudaFreeHost(const_cast<int64_t*>(released_));
}

cudaEvent_t KernelTimer::event() {
  cudaEvent_t e = nullptr;
  if (pool_.empty()) {
    TV_CUDA(cudaEventCreate(&e));
  } else {
    e = pool_.back();
    pool_.pop_back();
  }
  return e;
}

void KernelTimer::begin_step(cudaStream_t stream, int64_t tokens) {
  collect();
  ++step_;
  tokens_ = tokens;
  hold_kernel<<<1, 1, 0, stream>>>(released_, step_);
  check_cuda(cudaGetLastError(), "hold_kernel");
}

void KernelTimer::release() { *released_ = step_; }

void KernelTimer::start(cudaStream_t stream, const KernelWork& work) {
  if (!started_) launches_.push_back({work, 0, 0, event(), event()});
  started_ = true;  // and if it was already, that launch failed, and its events serve this one
  Launch& launch = launches_.back();
  launch.work = work;
  launch.step = step_;
  launch.tokens = tokens_;
  TV_CUDA(cudaEventRecord(launch.start, stream));
}

void KernelTimer::stop(cudaStream_t stream) {
  TV_CUDA(cudaEventRecord(launches_.back().stop, stream));
  started_ = false;
}

// Reads the events, and keeps them for later launches. Each start is measured from the stop before it: a float of
// milliseconds from the first event on would be too coarse after some seconds.
void KernelTimer::collect() {
  release();
  if (started_) {
    pool_.push_back(launches_.back().start);
    pool_.push_back(launches_.back().stop);
    launches_.pop_back();
    started_ = false;
  }
  if (launches_.empty()) return;
  TV_CUDA(cudaEventSynchronize(launches_.back().stop));
  for (const Launch& launch : launches_) {
    KernelRecord record;
    record.name = launch.work.name;
    record.step = launch.step;
    record.tokens = launch.tokens;
    record.bytes = launch.work.bytes;
    record.flops = launch.work.flops;
    record.start_us = last_stop_ ? last_stop_us_ + microseconds(last_stop_, launch.start) : 0;
    record.duration_us = microseconds(launch.start, launch.stop);
    records_.push_back(record);
    last_stop_us_ = record.start_us + record.duration_us;
    if (last_stop_) pool_.push_back(last_stop_);
    last_stop_ = launch.stop;
    pool_.push_back(launch.start);
  }
  launches_.clear();
}

std::vector<KernelRecord> KernelTimer::take() {
  collect();
  return std::exchange(records_, {});
}

}  // namespace tiny_vllm
