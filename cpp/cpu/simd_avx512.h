// Vec on AVX-512 (F, BW, DQ, VL): one register. With AVX512_BF16, dot() is one instruction.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // false alarms inside GCC 12's own header (its bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif

namespace tiny_vllm::TINY_VLLM_ISA {
namespace {

struct Vec {
  __m512 v;
};

inline __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec set1(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void store(float* p, Vec a, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec shift_left_23(Vec a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.v), 23))}; }

// A bfloat16 is the upper half of a float.
inline Vec widen(__m256i bits) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))}; }
inline Vec load(const bfloat16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec load(const bfloat16* p, int64_t n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }

// The conversion instruction of AVX512_BF16 flushes denormals, so rounding is done on the bits, as in base/dtype.h.
inline __m256i round_to_bf16(Vec a) {
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i bits = _mm512_mask_or_epi32(rounded, nan, u, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
}
inline void store(bfloat16* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_to_bf16(a)); }
inline void store(bfloat16* p, Vec a, int64_t n) { _mm256_mask_storeu_epi16(p, first_lanes(n), round_to_bf16(a)); }

inline float reduce_max(Vec a) { return _mm512_reduce_max_ps(a.v); }

// One step of the tree for two values at once: the left half of the result belongs to a, the right half to b.
inline Vec fold_8(Vec a, Vec b) {
  return {_mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xee))};
}
inline Vec fold_4(Vec a, Vec b) {
  return {_mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x88), _mm512_shuffle_f32x4(a.v, b.v, 0xdd))};
}
inline Vec fold_2(Vec a, Vec b) {
  const __m512d x = _mm512_castps_pd(a.v), y = _mm512_castps_pd(b.v);
  return {_mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)))};
}
inline Vec fold_1(Vec a, Vec b) {
  return {_mm512_add_ps(_mm512_shuffle_ps(a.v, b.v, 0x88), _mm512_shuffle_ps(a.v, b.v, 0xdd))};
}

inline float reduce_add(Vec a) {
  a = fold_8(a, a);
  a = fold_4(a, a);
  a = fold_2(a, a);
  return _mm512_cvtss_f32(fold_1(a, a).v);
}

inline Vec reduce_add(const Vec (&a)[16]) {
  const auto four = [&](int i) { return fold_4(fold_8(a[i], a[i + 4]), fold_8(a[i + 8], a[i + 12])); };
  return fold_1(fold_2(four(0), four(1)), fold_2(four(2), four(3)));
}

// A tile of matmul: weight rows x rows of x whose sums the registers can hold.
constexpr int kTileRows = 4, kTileCols = 4;

#if defined(__AVX512BF16__)

struct Pairs {
  __m512bh v;
};
inline Pairs load_pairs(const bfloat16* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
inline Pairs load_pairs(const bfloat16* p, int64_t n) {
  return {(__m512bh)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p)};
}
inline Vec dot(Vec acc, Pairs a, Pairs b) { return {_mm512_dpbf16_ps(acc.v, a.v, b.v)}; }

#else

struct Pairs {
  __m512 even, odd;
};
inline Pairs split(__m512i bits) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline Pairs load_pairs(const bfloat16* p) { return split(_mm512_loadu_si512(p)); }
inline Pairs load_pairs(const bfloat16* p, int64_t n) {
  return split(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p));
}
inline Vec dot(Vec acc, Pairs a, Pairs b) {
  return {_mm512_fmadd_ps(a.odd, b.odd, _mm512_fmadd_ps(a.even, b.even, acc.v))};
}

#endif

}  // namespace
}  // namespace tiny_vllm::TINY_VLLM_ISA
