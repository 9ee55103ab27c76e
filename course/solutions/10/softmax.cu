// Exercise 10.3: softmax, one block a row, on a GPU.
//
//   out (rows, n) = e^x / sum of e^x over the row
//
// Find the largest and the sum in one pass over the row. The block has blockDim.x threads, a multiple of 32, at most
// 1024. n is anything from 1 on. Numbers may be of any size; some may be -infinity, and a row that has no others gives
// zeros.
#include "simt.h"

struct State {
  float largest, sum;
};

__device__ float shift_of(float largest) { return largest == -INFINITY ? 0.0f : largest; }

__device__ State merge(State a, State b) {
  const float largest = fmaxf(a.largest, b.largest), shift = shift_of(largest);
  return {largest, a.sum * expf(a.largest - shift) + b.sum * expf(b.largest - shift)};
}

__device__ State warp_merge(State s) {
  for (int mask = 16; mask > 0; mask /= 2)
    s = merge(s, {__shfl_xor_sync(0xffffffff, s.largest, mask), __shfl_xor_sync(0xffffffff, s.sum, mask)});
  return s;
}

__global__ void softmax_kernel(const float* x, float* out, int n) {
  __shared__ State room[32];
  x += int64_t(blockIdx.x) * n;
  out += int64_t(blockIdx.x) * n;
  State state = {-INFINITY, 0};
  for (int i = threadIdx.x; i < n; i += blockDim.x) state = merge(state, {x[i], 1});

  state = warp_merge(state);
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (lane == 0) room[threadIdx.x / 32] = state;
  __syncthreads();
  state = warp_merge(lane < warps ? room[lane] : State{-INFINITY, 0});

  for (int i = threadIdx.x; i < n; i += blockDim.x)
    out[i] = state.sum == 0 ? 0.0f : expf(x[i] - shift_of(state.largest)) / state.sum;
}

// What the test calls.
extern "C" const char* softmax(const float* x, float* out, int rows, int n, int threads) {
  return report([&] {
    const DeviceArray<float> dx(x, size_t(rows) * n), result(out, size_t(rows) * n);
    launch(softmax_kernel, rows, threads, dx.get(), result.get(), n);
    result.copy_to(out);
  });
}
