// Vec on AVX2 and FMA: two registers of eight floats.
#pragma once

#include <immintrin.h>

namespace tiny_vllm::TINY_VLLM_ISA {
namespace {

struct Vec {
  __m256 lo, hi;  // lanes 0-7 and 8-15
};

// All ones in the first n of eight lanes.
inline __m256i lane_mask(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Vec load(const float* p, int64_t n) {
  return {_mm256_maskload_ps(p, lane_mask(n)), _mm256_maskload_ps(p + 8, lane_mask(n - 8))};
}
inline void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store(float* p, Vec a, int64_t n) {
  _mm256_maskstore_ps(p, lane_mask(n), a.lo);
  _mm256_maskstore_ps(p + 8, lane_mask(n - 8), a.hi);
}

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec shift_left_23(Vec a) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a.lo), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a.hi), 23))};
}

// A bfloat16 is the upper half of a float.
inline __m256 widen(__m128i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)); }
inline Vec load(const bfloat16* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {widen(_mm_loadu_si128(q)), widen(_mm_loadu_si128(q + 1))};
}
inline Vec load(const bfloat16* p, int64_t n) {
  alignas(32) bfloat16 copy[16] = {};
  for (int64_t i = 0; i < n; ++i) copy[i] = p[i];
  return load(copy);
}

// Eight floats rounded to bfloat16, in the low halves of their lanes (see to_bfloat16 in base/dtype.h).
inline __m256i round_lanes(__m256 a) {
  const __m256i u = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const __m256 nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  const __m256 bits = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan);
  return _mm256_srli_epi32(_mm256_castps_si256(bits), 16);
}
inline void store(bfloat16* p, Vec a) {
  // packus works within each half: lo0-3 hi0-3 | lo4-7 hi4-7, put in order by the permutation.
  const __m256i packed = _mm256_packus_epi32(round_lanes(a.lo), round_lanes(a.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline void store(bfloat16* p, Vec a, int64_t n) {
  bfloat16 copy[16];
  store(copy, a);
  for (int64_t i = 0; i < n; ++i) p[i] = copy[i];
}

inline float reduce_max(Vec a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

// Lanes i + i+8, then i + i+4: what is left are four lanes.
inline __m128 fold_to_4(Vec a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

inline float reduce_add(Vec a) {
  __m128 s = fold_to_4(a);
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// Four values at once: lane i of the result is the sum of a[i].
inline __m128 reduce_4(const Vec* a) {
  const __m128 s0 = fold_to_4(a[0]), s1 = fold_to_4(a[1]), s2 = fold_to_4(a[2]), s3 = fold_to_4(a[3]);
  const __m128 s01 = _mm_add_ps(_mm_movelh_ps(s0, s1), _mm_movehl_ps(s1, s0));
  const __m128 s23 = _mm_add_ps(_mm_movelh_ps(s2, s3), _mm_movehl_ps(s3, s2));
  return _mm_add_ps(_mm_shuffle_ps(s01, s23, 0x88), _mm_shuffle_ps(s01, s23, 0xdd));
}
inline Vec reduce_add(const Vec (&a)[16]) {
  return {_mm256_set_m128(reduce_4(a + 4), reduce_4(a)), _mm256_set_m128(reduce_4(a + 12), reduce_4(a + 8))};
}

// A tile of matmul: weight rows x rows of x whose sums the registers can hold.
constexpr int kTileRows = 2, kTileCols = 2;

struct Pairs {
  Vec even, odd;
};
inline Pairs load_pairs(const bfloat16* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  const __m256i lo = _mm256_loadu_si256(q), hi = _mm256_loadu_si256(q + 1);
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(lo, upper)), _mm256_castsi256_ps(_mm256_and_si256(hi, upper))}};
}
inline Pairs load_pairs(const bfloat16* p, int64_t n) {
  alignas(32) bfloat16 copy[32] = {};
  for (int64_t i = 0; i < n; ++i) copy[i] = p[i];
  return load_pairs(copy);
}
inline Vec dot(Vec acc, Pairs a, Pairs b) { return fma(a.odd, b.odd, fma(a.even, b.even, acc)); }

}  // namespace
}  // namespace tiny_vllm::TINY_VLLM_ISA
