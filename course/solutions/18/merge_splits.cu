// Exercise 18.3: the results of splits in one.
//
// The context of each row was cut into S splits. Of split s of row n we have, over the keys that it saw,
//
//   max      (N, S)      the largest score, -infinity if it saw no key
//   sum      (N, S)      sum of e^(score - max), 0 if it saw no key
//   partial  (N, S, Dh)  sum of e^(score - max) · value; anything, NaN too, if it saw no key
//
//   out      (N, Dh)     the softmax-weighted mean of the values of all splits; zeros if none has seen a key
//
// A block of blockDim.x threads for each row, a multiple of 32. S and Dh are anything from 1 on.
#include "simt.h"

__global__ void merge_splits_kernel(const float* max, const float* sum, const float* partial, float* out, int splits,
                                    int dim) {
  max += int64_t(blockIdx.x) * splits;
  sum += int64_t(blockIdx.x) * splits;
  partial += int64_t(blockIdx.x) * splits * dim;
  float largest = -INFINITY;
  for (int s = 0; s < splits; ++s) largest = fmaxf(largest, max[s]);
  for (int d = threadIdx.x; d < dim; d += blockDim.x) {
    float total = 0, result = 0;
    for (int s = 0; s < splits; ++s) {
      if (sum[s] == 0) continue;  // its partial may be anything, and e^(-inf + inf) is NaN
      const float weight = expf(max[s] - largest);
      total += weight * sum[s];
      result += weight * partial[int64_t(s) * dim + d];
    }
    out[int64_t(blockIdx.x) * dim + d] = total == 0 ? 0 : result / total;
  }
}

// What the test calls.
extern "C" const char* merge_splits(const float* max, const float* sum, const float* partial, float* out, int rows,
                                    int splits, int dim, int threads) {
  return report([&] {
    const size_t n = size_t(rows) * splits;
    const DeviceArray<float> m(max, n), s(sum, n), p(partial, n * dim), result(out, size_t(rows) * dim);
    launch(merge_splits_kernel, rows, threads, m.get(), s.get(), p.get(), result.get(), splits, dim);
    result.copy_to(out);
  });
}
