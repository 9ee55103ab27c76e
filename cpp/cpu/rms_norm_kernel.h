// RMSNorm (Zhang and Sennrich, arXiv 1910.07467): divide a row by its root mean square, then scale each element.
//
// Where bfloat16 is rounded matters: the differences are small in one layer and add up over thirty. The order is the
// one of the Hugging Face models, because their checkpoints were judged with it:
//   mean of squares in float -> x / rms rounded -> times weight, rounded again.
#pragma once

#include "cpu/simd.h"

namespace tiny_vllm::TINY_VLLM_ISA {
namespace {

inline Vec square_into(Vec sum, Vec x) { return fma(x, x, sum); }

// One row. out may be x.
template <typename T>
inline void rms_norm_row(const T* x, const T* weight, float eps, T* out, int64_t dim) {
  Vec squares = zero();
  int64_t i = 0;
  for (; i + 16 <= dim; i += 16) squares = square_into(squares, load(x + i));
  if (i < dim) squares = square_into(squares, load(x + i, dim - i));

  const float mean = reduce_add(squares) / static_cast<float>(dim);
  const Vec inverse_rms = set1(1.0f / __builtin_sqrtf(mean + eps));

  // The store is the first rounding; reading it back gives what was rounded.
  for (i = 0; i + 16 <= dim; i += 16) {
    store(out + i, load(x + i) * inverse_rms);
    store(out + i, load(out + i) * load(weight + i));
  }
  if (i < dim) {
    const int64_t n = dim - i;
    store(out + i, load(x + i, n) * inverse_rms, n);
    store(out + i, load(out + i, n) * load(weight + i, n), n);
  }
}

template <typename T>
void rms_norm(const T* x, const T* weight, float eps, T* out, int64_t rows, int64_t dim) {
  for (int64_t row = 0; row < rows; ++row) rms_norm_row(x + row * dim, weight, eps, out + row * dim, dim);
}

}  // namespace
}  // namespace tiny_vllm::TINY_VLLM_ISA
