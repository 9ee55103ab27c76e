// Vec in plain C++: sixteen floats in an array. The slowest and the easiest to read; the others do the same, faster.
#pragma once

namespace tiny_vllm::TINY_VLLM_ISA {
namespace {

struct Vec {
  float v[16];
};

// Vec with lane i = f(i).
template <typename F>
inline Vec make(F f) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.v[i] = f(i);
  return r;
}

inline float widen(bfloat16 x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16); }

inline bfloat16 round_to_bf16(float x) {
  const uint32_t u = __builtin_bit_cast(uint32_t, x);
  if (x != x) return {static_cast<uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

inline Vec zero() {
  return make([](int) { return 0.0f; });
}
inline Vec set1(float x) {
  return make([=](int) { return x; });
}
inline Vec load(const float* p) {
  return make([=](int i) { return p[i]; });
}
inline Vec load(const float* p, int64_t n) {
  return make([=](int i) { return i < n ? p[i] : 0.0f; });
}
inline Vec load(const bfloat16* p) {
  return make([=](int i) { return widen(p[i]); });
}
inline Vec load(const bfloat16* p, int64_t n) {
  return make([=](int i) { return i < n ? widen(p[i]) : 0.0f; });
}
inline void store(float* p, Vec a, int64_t n = 16) {
  for (int i = 0; i < n; ++i) p[i] = a.v[i];
}
inline void store(bfloat16* p, Vec a, int64_t n = 16) {
  for (int i = 0; i < n; ++i) p[i] = round_to_bf16(a.v[i]);
}

inline Vec operator+(const Vec& a, const Vec& b) {
  return make([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec operator-(const Vec& a, const Vec& b) {
  return make([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec operator*(const Vec& a, const Vec& b) {
  return make([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec operator/(const Vec& a, const Vec& b) {
  return make([&](int i) { return a.v[i] / b.v[i]; });
}
// Two roundings: a processor without a fused multiply-add would need a slow library call for one.
inline Vec fma(const Vec& a, const Vec& b, const Vec& c) {
  return make([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline Vec max(const Vec& a, const Vec& b) {
  return make([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec min(const Vec& a, const Vec& b) {
  return make([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec shift_left_23(const Vec& a) {
  return make([&](int i) { return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, a.v[i]) << 23); });
}

inline float reduce_max(const Vec& a) {
  float m = a.v[0];
  for (int i = 1; i < 16; ++i) m = a.v[i] > m ? a.v[i] : m;
  return m;
}

inline float reduce_add(Vec a) {
  for (int half = 8; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
  }
  return a.v[0];
}

inline Vec reduce_add(const Vec (&a)[16]) {
  return make([&](int i) { return reduce_add(a[i]); });
}

// A tile of matmul: weight rows x rows of x whose sums the registers can hold.
constexpr int kTileRows = 2, kTileCols = 2;

struct Pairs {
  Vec even, odd;
};
inline Pairs load_pairs(const bfloat16* p, int64_t n) {
  return {make([=](int i) { return 2 * i < n ? widen(p[2 * i]) : 0.0f; }),
          make([=](int i) { return 2 * i + 1 < n ? widen(p[2 * i + 1]) : 0.0f; })};
}
inline Pairs load_pairs(const bfloat16* p) { return load_pairs(p, 32); }
inline Vec dot(const Vec& acc, const Pairs& a, const Pairs& b) { return fma(a.odd, b.odd, fma(a.even, b.even, acc)); }

}  // namespace
}  // namespace tiny_vllm::TINY_VLLM_ISA
