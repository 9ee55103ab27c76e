// exp and what is made of it, on sixteen floats at once.
#pragma once

#include "cpu/simd.h"

namespace tiny_vllm::TINY_VLLM_ISA {
namespace {

// e^x, within about one unit in the last place. e^-inf is exactly 0; below -87.7 the result is 0, above 88.4 infinity;
// NaN stays NaN.
//
// x = n ln2 + r with |r| <= ln2 / 2, so e^x = 2^n e^r. The Taylor series of e^r to the 7th power is off by less than
// r^8 / 8! = 6e-9, a tenth of what a float can tell apart near 1.
inline Vec exp(Vec x) {
  x = min(set1(89.0f), max(set1(-88.0f), x));

  // Adding 1.5 * 2^23 leaves no bits for a fraction: the sum is rounded to an integer, which sits in its low bits.
  // The 127 more make those low bits the exponent field of 2^n.
  const Vec magic = set1(12582912.0f + 127.0f);
  const Vec shifted = fma(x, set1(1.44269504f), magic);
  const Vec n = shifted - magic;
  const Vec two_to_n = shift_left_23(shifted);

  // ln2 in two parts: n times the first one is exact.
  Vec r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);

  Vec p = set1(1.0f / 5040);
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return p * two_to_n;
}

inline float exp(float x) {
  float lanes[16];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

// 1 / (1 + e^-x)
inline Vec sigmoid(Vec x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }

}  // namespace
}  // namespace tiny_vllm::TINY_VLLM_ISA
