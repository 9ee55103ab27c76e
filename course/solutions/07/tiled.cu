// Exercise 7.2: a matrix product in tiles.
//
//   out (M, N) = x (M, K) · weight (N, K)ᵀ
//
// Blocks of 16 x 16 threads, each for 16 x 16 elements of out. M, N and K are anything from 1 on. x and weight count
// how often they are read: each of their numbers may be read once for each tile of out that needs it.
#include "simt.h"

constexpr int kTile = 16;

struct Counted {
  const float* numbers;
  int* reads;
  __device__ float operator[](int64_t i) const {
    atomicAdd(reads, 1);
    return numbers[i];
  }
};

__global__ void tiled_kernel(Counted x, Counted weight, float* out, int rows, int columns, int inner) {
  __shared__ float x_tile[kTile][kTile + 1], weight_tile[kTile][kTile + 1];  // one more: other banks
  const int c = threadIdx.x, r = threadIdx.y;
  const int m = blockIdx.y * kTile + r, n = blockIdx.x * kTile + c, n_to_load = blockIdx.x * kTile + r;
  float sum = 0;
  for (int first = 0; first < inner; first += kTile) {
    const bool in_row = first + c < inner;
    x_tile[r][c] = m < rows && in_row ? x[int64_t(m) * inner + first + c] : 0;
    weight_tile[r][c] = n_to_load < columns && in_row ? weight[int64_t(n_to_load) * inner + first + c] : 0;
    __syncthreads();
    for (int k = 0; k < kTile; ++k) sum += x_tile[r][k] * weight_tile[c][k];
    __syncthreads();
  }
  if (m < rows && n < columns) out[int64_t(m) * columns + n] = sum;
}

// What the test calls. There are `behind` numbers behind each matrix, so that it sees what is done there.
extern "C" const char* tiled(const float* x, const float* weight, float* out, int rows, int columns, int inner,
                             int behind, int* reads) {
  return report([&] {
    const DeviceArray<float> dx(x, size_t(rows) * inner + behind), dw(weight, size_t(columns) * inner + behind);
    const DeviceArray<float> result(out, size_t(rows) * columns + behind);
    const DeviceArray<int> counts(reads, 2);
    const dim3 grid((columns + kTile - 1) / kTile, (rows + kTile - 1) / kTile);
    launch(tiled_kernel, grid, dim3(kTile, kTile), Counted{dx.get(), counts.get()}, Counted{dw.get(), counts.get() + 1},
           result.get(), rows, columns, inner);
    result.copy_to(out);
    counts.copy_to(reads);
  });
}
