// Exercise 6.1: RMSNorm, one block a row.
//
//   out (rows, dim) = x / sqrt(mean(x²) + eps) · weight
//
// The block has blockDim.x threads, a multiple of 32, at most 1024. dim is anything from 1 on.
#include "simt.h"

__global__ void rms_norm_kernel(const float* x, const float* weight, float eps, float* out, int dim) {
  // Your turn. Thread threadIdx.x of block blockIdx.x: the row is x + blockIdx.x * dim.
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
