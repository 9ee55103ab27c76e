// Exercise 8.1: turn queries and keys, half-split.
//
//   heads (rows, count, dim)    turned in place; row t holds the `count` heads of token t
//   cos_sin (rows, dim/2, 2)    cosine and sine for each pair of each row
//
// Element i of a head turns together with element i + dim/2. dim is any even number, and blockDim.x any number at all.
#include "simt.h"

__global__ void rope_kernel(float* heads, const float* cos_sin, int rows, int count, int dim) {
  const int half = dim / 2;
  const int64_t pair = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (pair >= int64_t(rows) * count * half) return;
  const int64_t head = pair / half, row = head / count;
  const int i = static_cast<int>(pair % half);
  float* at = heads + head * dim;
  const float cos = cos_sin[row * dim + 2 * i], sin = cos_sin[row * dim + 2 * i + 1];
  const float a = at[i], b = at[i + half];  // both are read before either is written
  at[i] = a * cos - b * sin;
  at[i + half] = b * cos + a * sin;
}

// What the test calls.
extern "C" const char* rope(float* heads, const float* cos_sin, int rows, int count, int dim, int threads) {
  return report([&] {
    const size_t n = size_t(rows) * count * dim;
    const DeviceArray<float> dheads(heads, n), dangles(cos_sin, size_t(rows) * dim);
    launch(rope_kernel, unsigned(n / 2 + threads - 1) / threads, threads, dheads.get(), dangles.get(), rows, count,
           dim);
    dheads.copy_to(heads);
  });
}
