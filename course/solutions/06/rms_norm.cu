// Exercise 6.1: RMSNorm, one block a row.
//
//   out (rows, dim) = x / sqrt(mean(x²) + eps) · weight
//
// The block has blockDim.x threads, a multiple of 32, at most 1024. dim is anything from 1 on.
#include "simt.h"

__device__ float warp_sum(float value) {
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffff, value, mask);
  return value;
}

__global__ void rms_norm_kernel(const float* x, const float* weight, float eps, float* out, int dim) {
  __shared__ float room[32];
  x += int64_t(blockIdx.x) * dim;
  out += int64_t(blockIdx.x) * dim;
  float squares = 0;  // stays 0 in a thread that has no element
  for (int i = threadIdx.x; i < dim; i += blockDim.x) squares += x[i] * x[i];

  squares = warp_sum(squares);
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (lane == 0) room[threadIdx.x / 32] = squares;
  __syncthreads();
  const float total = warp_sum(lane < warps ? room[lane] : 0.0f);  // what no warp wrote is not read

  const float scale = 1 / sqrtf(total / dim + eps);
  for (int i = threadIdx.x; i < dim; i += blockDim.x) out[i] = x[i] * scale * weight[i];
}

// What the test calls.
extern "C" const char* rms_norm(const float* x, const float* weight, float eps, float* out, int rows, int dim,
                                int threads) {
  return report([&] {
    const DeviceArray<float> dx(x, size_t(rows) * dim), dw(weight, dim), result(out, size_t(rows) * dim);
    launch(rms_norm_kernel, rows, threads, dx.get(), dw.get(), eps, result.get(), dim);
    result.copy_to(out);
  });
}
