// Softmax over a stream: the weighted mean of values, without ever holding all the scores.
//
//   softmax(s)·V = sum_j e^(s_j - m) v_j / sum_j e^(s_j - m),  for any m; the largest score keeps e^ from overflowing.
//
// When a larger score turns up, what was summed so far is multiplied by e^(old m - new m) and goes on counting
// (Milakov and Gimelshein, arXiv 1805.02867). Two such states over different keys merge into one the same way, so the
// keys may be cut into parts and the parts attended to by different threads (Dao et al., arXiv 2205.14135).
//
// The awkward cases live here and nowhere else:
//   - No key seen: max = -inf, sum = 0, out = 0. It finishes as zeros, and merging it changes not a bit of the other.
//   - A masked key has score -inf and so weight e^-inf = 0 exactly. While every key so far was masked, max is still
//     -inf, and -inf - -inf would be NaN: 0 is subtracted instead. A NaN score stays NaN, and is seen further down.
//   - No finite stand-in for -inf: real scores may lie below any that one could pick.
#pragma once

#include "cpu/vec_math.h"

namespace tiny_vllm::TINY_VLLM_ISA {
namespace {

struct OnlineSoftmax {
  float max = -kInfinity;  // largest score so far
  float sum = 0;           // sum of e^(score - max)
  float* out = nullptr;    // (Dh) sum of e^(score - max) * value; room given by the owner

  void init(float* room, int64_t dim) {
    max = -kInfinity;
    sum = 0;
    out = room;
    for (int64_t i = 0; i < dim; ++i) out[i] = 0;
  }

  // Takes in n scores (n a multiple of 16), in two steps. The first finds the new maximum and returns what `out` must
  // be multiplied by; the second turns the scores into weights, in place. What is left to the caller:
  //   out = out * factor + sum_j weight_j * value_j
  float raise_max(const float* scores, int64_t n) {
    Vec largest = set1(max);
    for (int64_t j = 0; j < n; j += 16) largest = tiny_vllm::TINY_VLLM_ISA::max(load(scores + j), largest);
    const float old_max = max;
    max = reduce_max(largest);
    const float factor = exp(old_max - shift());  // 0 for the first real score: the maximum was -inf
    sum *= factor;
    return factor;
  }

  void weigh(float* scores, int64_t n) {
    const Vec subtract = set1(shift());
    Vec weights = zero();
    for (int64_t j = 0; j < n; j += 16) {
      const Vec w = exp(load(scores + j) - subtract);
      store(scores + j, w);
      weights = weights + w;
    }
    sum += reduce_add(weights);
  }

  // What is subtracted from a score before e^. All masked so far: e^(-inf - 0) is the 0 that we want.
  float shift() const { return max == -kInfinity ? 0.0f : max; }

  // Takes in what another state saw.
  void merge(float other_max, float other_sum, const float* other_out, int64_t dim) {
    if (other_sum == 0) return;
    if (sum == 0) {
      max = other_max;
      sum = other_sum;
      for (int64_t i = 0; i < dim; ++i) out[i] = other_out[i];
      return;
    }
    const float new_max = max > other_max ? max : other_max;
    const float mine = exp(max - new_max), theirs = exp(other_max - new_max);
    sum = sum * mine + other_sum * theirs;
    for (int64_t i = 0; i < dim; ++i) out[i] = out[i] * mine + other_out[i] * theirs;
    max = new_max;
  }

  // The weighted mean -> result (Dh), rounded once.
  template <typename T>
  void finish(T* result, int64_t dim) const {
    const Vec divisor = set1(sum == 0 ? 1.0f : sum);  // nothing seen: out is zero, and so is the result
    int64_t i = 0;
    for (; i + 16 <= dim; i += 16) store(result + i, load(out + i) / divisor);
    if (i < dim) store(result + i, load(out + i, dim - i) / divisor, dim - i);
  }
};

}  // namespace
}  // namespace tiny_vllm::TINY_VLLM_ISA
