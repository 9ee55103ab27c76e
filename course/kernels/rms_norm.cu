// RMSNorm five times, one idea each, and once wrong: docs/course/06-rms-norm.md tells the story. The engine has the
// last of the five, for bfloat16, in cuda/kernels/rms_norm.cu.
//
//   out (rows, D) = x / sqrt(mean(x²) + eps) · weight, in float32
//
// Compiles with nvcc, and with g++ for a CPU (simt.h): python -m tiny_vllm.course 6 does either.
#include "simt.h"

// 1. One thread a row.
__global__ void naive(const float* x, const float* weight, float eps, float* out, int rows, int dim) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  x += int64_t(row) * dim;
  out += int64_t(row) * dim;
  float squares = 0;
  for (int i = 0; i < dim; ++i) squares += x[i] * x[i];
  const float scale = 1 / sqrtf(squares / dim + eps);
  for (int i = 0; i < dim; ++i) out[i] = x[i] * scale * weight[i];
}

constexpr int kThreads = 256;

// 2. One block a row; thread 0 adds up what the others found.
__global__ void one_adds(const float* x, const float* weight, float eps, float* out, int, int dim) {
  __shared__ float partial[kThreads];
  x += int64_t(blockIdx.x) * dim;
  out += int64_t(blockIdx.x) * dim;
  float squares = 0;
  for (int i = threadIdx.x; i < dim; i += kThreads) squares += x[i] * x[i];
  partial[threadIdx.x] = squares;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int t = 1; t < kThreads; ++t) partial[0] += partial[t];
  __syncthreads();
  const float scale = 1 / sqrtf(partial[0] / dim + eps);
  for (int i = threadIdx.x; i < dim; i += kThreads) out[i] = x[i] * scale * weight[i];
}

// 3. A tree: half of the threads add the other half's, then a quarter, and so on.
__global__ void tree(const float* x, const float* weight, float eps, float* out, int, int dim) {
  __shared__ float partial[kThreads];
  x += int64_t(blockIdx.x) * dim;
  out += int64_t(blockIdx.x) * dim;
  float squares = 0;
  for (int i = threadIdx.x; i < dim; i += kThreads) squares += x[i] * x[i];
  partial[threadIdx.x] = squares;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();  // outside of the if: all threads of the block must come
  }
  const float scale = 1 / sqrtf(partial[0] / dim + eps);
  for (int i = threadIdx.x; i < dim; i += kThreads) out[i] = x[i] * scale * weight[i];
}

// The sum over the 32 threads of a warp, which all of them get.
__device__ float warp_sum(float value) {
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffff, value, mask);
  return value;
}

// The sum over the block: in each warp first, then over the warps. `room` has a place for each warp.
__device__ float block_sum(float value, float* room) {
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < kThreads / 32 ? room[threadIdx.x % 32] : 0.0f);
}

// 4. Threads of a warp read each other's registers: of nine barriers one is left.
__global__ void shuffle(const float* x, const float* weight, float eps, float* out, int, int dim) {
  __shared__ float room[kThreads / 32];
  x += int64_t(blockIdx.x) * dim;
  out += int64_t(blockIdx.x) * dim;
  float squares = 0;
  for (int i = threadIdx.x; i < dim; i += kThreads) squares += x[i] * x[i];
  const float scale = 1 / sqrtf(block_sum(squares, room) / dim + eps);
  for (int i = threadIdx.x; i < dim; i += kThreads) out[i] = x[i] * scale * weight[i];
}

constexpr int kMost = 4;  // vectors of a row that a thread keeps

// 5. Four numbers a load, and the row stays in registers: it is read once. dim is a multiple of 4, up to 4096.
__global__ void vectorised(const float* x, const float* weight, float eps, float* out, int, int dim) {
  __shared__ float room[kThreads / 32];
  const float4* input = reinterpret_cast<const float4*>(x + int64_t(blockIdx.x) * dim);
  float4* output = reinterpret_cast<float4*>(out + int64_t(blockIdx.x) * dim);
  float4 kept[kMost];
  float squares = 0;
  for (int j = 0; j < kMost; ++j) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= dim / 4) break;
    const float4 v = kept[j] = input[i];
    squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  const float scale = 1 / sqrtf(block_sum(squares, room) / dim + eps);
  for (int j = 0; j < kMost; ++j) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= dim / 4) break;
    const float4 v = kept[j], w = reinterpret_cast<const float4*>(weight)[i];
    output[i] = {v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z, v.w * scale * w.w};
  }
}

// 6. Wrong: the tree, and the barrier in its loop forgotten.
__global__ void forgetful(const float* x, const float* weight, float eps, float* out, int, int dim) {
  __shared__ float partial[kThreads];
  x += int64_t(blockIdx.x) * dim;
  out += int64_t(blockIdx.x) * dim;
  float squares = 0;
  for (int i = threadIdx.x; i < dim; i += kThreads) squares += x[i] * x[i];
  partial[threadIdx.x] = squares;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2)
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  __syncthreads();
  const float scale = 1 / sqrtf(partial[0] / dim + eps);
  for (int i = threadIdx.x; i < dim; i += kThreads) out[i] = x[i] * scale * weight[i];
}

// Runs version 1 ... 6 on host arrays; *ms is the time of its fastest run.
extern "C" const char* rms_norm(int version, const float* x, const float* weight, float eps, float* out, int rows,
                                int dim, float* ms) {
  return report([&] {
    if (dim % 4 != 0 || dim > kMost * kThreads * 4) throw std::runtime_error("dim must be a multiple of 4, up to 4096");
    void (*const kernels[])(const float*, const float*, float, float*, int, int) = {naive,   one_adds,   tree,
                                                                                    shuffle, vectorised, forgetful};
    const DeviceArray<float> dx(x, size_t(rows) * dim), dw(weight, dim), result(out, size_t(rows) * dim);
    const unsigned blocks = version == 1 ? (rows + kThreads - 1) / kThreads : rows;
    *ms = milliseconds_of(
        [&] { launch(kernels[version - 1], blocks, kThreads, dx.get(), dw.get(), eps, result.get(), rows, dim); });
    result.copy_to(out);
  });
}
