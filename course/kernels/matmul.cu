// The matrix product three times, one idea each: docs/course/07-matrices.md tells the story. The engine has cuBLAS for
// many rows (cuda/gemm.cu), and for few rows a kernel of its own, of which the third is a sketch
// (cuda/kernels/gemv.cu).
//
//   out (M, N) = x (M, K) · weight (N, K)ᵀ, in float32
//
// Compiles with nvcc, and with g++ for a CPU (simt.h): python -m tiny_vllm.course 7 does either.
#include "simt.h"

constexpr int kTile = 16;

// 1. One thread an element of out. Blocks of 16 x 16 threads.
__global__ void naive(const float* x, const float* weight, float* out, int rows, int columns, int inner) {
  const int n = blockIdx.x * kTile + threadIdx.x, m = blockIdx.y * kTile + threadIdx.y;
  if (m >= rows || n >= columns) return;
  float sum = 0;
  for (int k = 0; k < inner; ++k) sum += x[int64_t(m) * inner + k] * weight[int64_t(n) * inner + k];
  out[int64_t(m) * columns + n] = sum;
}

// 2. A block brings tiles of 16 x 16 numbers into shared memory, and each number is used 16 times from there.
__global__ void tiled(const float* x, const float* weight, float* out, int rows, int columns, int inner) {
  __shared__ float x_tile[kTile][kTile + 1], weight_tile[kTile][kTile + 1];
  const int c = threadIdx.x, r = threadIdx.y, m = blockIdx.y * kTile + r, n = blockIdx.x * kTile + c;
  const int n_to_load = blockIdx.x * kTile + r;  // neighbouring threads load neighbouring k
  float sum = 0;
  for (int first = 0; first < inner; first += kTile) {
    const bool in_row = first + c < inner;
    x_tile[r][c] = m < rows && in_row ? x[int64_t(m) * inner + first + c] : 0;
    weight_tile[r][c] = n_to_load < columns && in_row ? weight[int64_t(n_to_load) * inner + first + c] : 0;
    __syncthreads();  // the tiles are complete
    for (int k = 0; k < kTile; ++k) sum += x_tile[r][k] * weight_tile[c][k];
    __syncthreads();  // nobody reads them any more
  }
  if (m < rows && n < columns) out[int64_t(m) * columns + n] = sum;
}

constexpr int kWarps = 4, kMost = 8;  // of a block; rows of x at a time

// 3. One warp a row of the weight, which is read once for eight rows of x. inner is a multiple of 4.
__global__ void warp_a_row(const float* x, const float* weight, float* out, int rows, int columns, int inner) {
  const int lane = threadIdx.x % 32, n = blockIdx.x * kWarps + threadIdx.x / 32, first = blockIdx.y * kMost;
  if (n >= columns) return;  // the whole warp
  const int count = min(kMost, rows - first), width = inner / 4;
  const float4* w = reinterpret_cast<const float4*>(weight) + int64_t(n) * width;
  float sums[kMost] = {};
  for (int i = lane; i < width; i += 32) {
    const float4 a = w[i];
    for (int r = 0; r < kMost; ++r) {
      if (r >= count) break;
      const float4 b = reinterpret_cast<const float4*>(x)[int64_t(first + r) * width + i];
      sums[r] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
    }
  }
  for (int r = 0; r < kMost; ++r) {
    if (r >= count) break;
    for (int mask = 16; mask > 0; mask /= 2) sums[r] += __shfl_xor_sync(0xffffffff, sums[r], mask);
    if (lane == 0) out[int64_t(first + r) * columns + n] = sums[r];
  }
}

// Runs version 1 ... 3 on host arrays; *ms is the time of its fastest run.
extern "C" const char* matmul(int version, const float* x, const float* weight, float* out, int rows, int columns,
                              int inner, float* ms) {
  return report([&] {
    if (inner % 4 != 0) throw std::runtime_error("inner must be a multiple of 4");
    void (*const kernels[])(const float*, const float*, float*, int, int, int) = {naive, tiled, warp_a_row};
    const DeviceArray<float> dx(x, size_t(rows) * inner), dw(weight, size_t(columns) * inner);
    const DeviceArray<float> result(out, size_t(rows) * columns);
    const auto pieces = [](int n, int size) { return static_cast<unsigned>((n + size - 1) / size); };
    const dim3 grid = version == 3 ? dim3(pieces(columns, kWarps), pieces(rows, kMost))
                                   : dim3(pieces(columns, kTile), pieces(rows, kTile));
    const dim3 block = version == 3 ? dim3(32 * kWarps) : dim3(kTile, kTile);
    *ms = milliseconds_of(
        [&] { launch(kernels[version - 1], grid, block, dx.get(), dw.get(), result.get(), rows, columns, inner); });
    result.copy_to(out);
  });
}
