// The first kernels: the same copy three times, and once wrong. docs/course/03-memory-and-kernels.md tells the story.
//
//   out (n) = x (n), in float32
//
// Compiles with nvcc, and with g++ for a CPU (simt.h): python -m tiny_vllm.course 3 does either.
#include "simt.h"

// 1. A thread for each number.
__global__ void one_each(const float* x, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;  // the last block may have threads too many
  out[i] = x[i];
}

constexpr int kEach = 8;  // numbers that a thread of 2 and 3 takes

// 2. Eight numbers a thread, side by side: as we would share out work among the threads of a CPU.
__global__ void side_by_side(const float* x, float* out, int n) {
  const int first = (blockIdx.x * blockDim.x + threadIdx.x) * kEach;
  for (int i = first; i < first + kEach && i < n; ++i) out[i] = x[i];
}

// 3. Eight numbers a thread, a whole grid apart: in each round, neighbouring threads take neighbouring numbers.
__global__ void in_step(const float* x, float* out, int n) {
  const int threads = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads) out[i] = x[i];
}

// 4. Wrong: 1 without its check.
__global__ void unchecked(const float* x, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = x[i];
}

// Runs version 1 ... 4 on host arrays, with this many threads a block; *ms is the time of its fastest run. The arrays
// have `room` numbers, of which the first n are to be copied: so that what is written behind them is seen.
extern "C" const char* copy(int version, const float* x, float* out, int n, int room, int threads, float* ms) {
  return report([&] {
    void (*const kernels[])(const float*, float*, int) = {one_each, side_by_side, in_step, unchecked};
    const int each = version == 2 || version == 3 ? kEach : 1;
    const int blocks = (n + threads * each - 1) / (threads * each);  // rounded up
    if (blocks * threads * each > room) throw std::runtime_error("the arrays need room for the last block");
    const DeviceArray<float> from(x, room), to(out, room);
    *ms = milliseconds_of([&] { launch(kernels[version - 1], blocks, threads, from.get(), to.get(), n); });
    to.copy_to(out);
  });
}

// A launch whose error nobody looks at.
extern "C" const char* careless_copy(const float* x, float* out, int n, int threads) {
  return report([&] {
    const DeviceArray<float> from(x, n), to(out, n);
    try {
      launch(one_each, (n + threads - 1) / threads, threads, from.get(), to.get(), n);
    } catch (const std::exception&) {
    }
    to.copy_to(out);
  });
}
