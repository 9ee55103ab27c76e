// Exercise 20.1: two kernels in one.
//
//   x (rows, dim) += y (rows, dim), and then out (rows, dim) = x / sqrt(mean(x²) + eps) · weight (dim)
//
// Other engines fuse these two. Both results are wanted: the sum in x, which later layers read, and the normalised row.
// One block a row; it has blockDim.x threads, a multiple of 32, at most 1024. dim is anything from 1 on.
#include "simt.h"

// What is read through this is counted: each number of y may be read once.
struct Counted {
  const float* numbers;
  int* reads;
  __device__ float operator[](int64_t i) const {
    atomicAdd(reads, 1);
    return numbers[i];
  }
};

__device__ float warp_sum(float value) {
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffff, value, mask);
  return value;
}

__global__ void add_norm_kernel(Counted y, float* x, const float* weight, float eps, float* out, int dim) {
  __shared__ float room[32];
  const int64_t row = int64_t(blockIdx.x) * dim;
  float squares = 0;
  for (int i = threadIdx.x; i < dim; i += blockDim.x) {
    const float sum = x[row + i] + y[row + i];
    x[row + i] = sum;
    squares += sum * sum;
  }
  squares = warp_sum(squares);
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (lane == 0) room[threadIdx.x / 32] = squares;
  __syncthreads();
  const float total = warp_sum(lane < warps ? room[lane] : 0.0f);
  const float scale = 1 / sqrtf(total / dim + eps);
  // A thread reads what it has written itself, so no other barrier is needed.
  for (int i = threadIdx.x; i < dim; i += blockDim.x) out[row + i] = x[row + i] * scale * weight[i];
}

// What the test calls.
extern "C" const char* add_norm(const float* y, float* x, const float* weight, float eps, float* out, int rows, int dim,
                                int threads, int* reads) {
  return report([&] {
    const DeviceArray<float> dy(y, size_t(rows) * dim), dx(x, size_t(rows) * dim), dw(weight, dim);
    const DeviceArray<float> result(out, size_t(rows) * dim);
    const DeviceArray<int> counts(reads, 1);
    launch(add_norm_kernel, rows, threads, Counted{dy.get(), counts.get()}, dx.get(), dw.get(), eps, result.get(), dim);
    dx.copy_to(x);
    result.copy_to(out);
    counts.copy_to(reads);
  });
}
