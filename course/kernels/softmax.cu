// Softmax five times: docs/course/10-online-softmax.md tells the story. The engine has the last two, inside of its
// attention: cpp/cpu/online_softmax.h and cuda/kernels/attention_tile.h.
//
//   out (rows, n) = e^x / sum of e^x over the row, in float32. A score of -infinity is a hidden key: its weight is 0.
//   A row that is all hidden has no softmax; we want zeros.
//
// Compiles with nvcc, and with g++ for a CPU (simt.h): python -m tiny_vllm.course 10 does either.
#include "simt.h"

// 1. As the formula reads. One thread a row, here and in 2 to 4.
__global__ void naive(const float* x, float* out, int rows, int n) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  x += int64_t(row) * n;
  out += int64_t(row) * n;
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += expf(x[i]);
  for (int i = 0; i < n; ++i) out[i] = expf(x[i]) / sum;
}

// 2. The largest is subtracted: no exponent is above 0. The row is read three times.
__global__ void three_passes(const float* x, float* out, int rows, int n) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  x += int64_t(row) * n;
  out += int64_t(row) * n;
  float largest = -INFINITY, sum = 0;
  for (int i = 0; i < n; ++i) largest = fmaxf(largest, x[i]);
  for (int i = 0; i < n; ++i) sum += expf(x[i] - largest);
  for (int i = 0; i < n; ++i) out[i] = expf(x[i] - largest) / sum;
}

// 3. Maximum and sum in one pass: what was summed before a new maximum is made smaller.
__global__ void online(const float* x, float* out, int rows, int n) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  x += int64_t(row) * n;
  out += int64_t(row) * n;
  float largest = -INFINITY, sum = 0;
  for (int i = 0; i < n; ++i) {
    const float now = fmaxf(largest, x[i]);
    sum = sum * expf(largest - now) + expf(x[i] - now);
    largest = now;
  }
  for (int i = 0; i < n; ++i) out[i] = expf(x[i] - largest) / sum;
}

// What is known of some scores: the largest, and the sum of e^(score - largest). One score x is {x, 1}, none {-inf, 0}.
struct State {
  float largest, sum;
};

// What is subtracted before e^: -inf - -inf would be NaN, and e^(-inf - 0) is the 0 that we want.
__device__ float shift_of(float largest) { return largest == -INFINITY ? 0.0f : largest; }

// The state of the scores of both.
__device__ State merge(State a, State b) {
  const float largest = fmaxf(a.largest, b.largest), shift = shift_of(largest);
  return {largest, a.sum * expf(a.largest - shift) + b.sum * expf(b.largest - shift)};
}

__device__ float weight_of(float score, State s) {
  return s.sum == 0 ? 0.0f : expf(score - shift_of(s.largest)) / s.sum;
}

// 4. The same, and a row may begin with hidden keys, or have no other.
__global__ void online_guarded(const float* x, float* out, int rows, int n) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  x += int64_t(row) * n;
  out += int64_t(row) * n;
  State state = {-INFINITY, 0};
  for (int i = 0; i < n; ++i) state = merge(state, {x[i], 1});
  for (int i = 0; i < n; ++i) out[i] = weight_of(x[i], state);
}

constexpr int kThreads = 128;

// The state of the 32 threads' scores, which all of them get.
__device__ State warp_merge(State state) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const State other = {__shfl_xor_sync(0xffffffff, state.largest, mask),
                         __shfl_xor_sync(0xffffffff, state.sum, mask)};
    state = merge(state, other);
  }
  return state;
}

// 5. One block a row: each thread has a state of its own scores, and states merge as sums do in chapter 6.
__global__ void block_a_row(const float* x, float* out, int, int n) {
  __shared__ State room[kThreads / 32];
  x += int64_t(blockIdx.x) * n;
  out += int64_t(blockIdx.x) * n;
  State state = {-INFINITY, 0};
  for (int i = threadIdx.x; i < n; i += kThreads) state = merge(state, {x[i], 1});
  state = warp_merge(state);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = state;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  state = warp_merge(lane < kThreads / 32 ? room[lane] : State{-INFINITY, 0});
  for (int i = threadIdx.x; i < n; i += kThreads) out[i] = weight_of(x[i], state);
}

// Runs version 1 ... 5 on host arrays; *ms is the time of its fastest run.
extern "C" const char* softmax(int version, const float* x, float* out, int rows, int n, float* ms) {
  return report([&] {
    void (*const kernels[])(const float*, float*, int, int) = {naive, three_passes, online, online_guarded,
                                                               block_a_row};
    const DeviceArray<float> dx(x, size_t(rows) * n), result(out, size_t(rows) * n);
    const unsigned blocks = version == 5 ? rows : (rows + kThreads - 1) / kThreads;
    *ms = milliseconds_of([&] { launch(kernels[version - 1], blocks, kThreads, dx.get(), result.get(), rows, n); });
    result.copy_to(out);
  });
}
