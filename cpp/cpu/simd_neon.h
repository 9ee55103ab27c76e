// Vec on 64-bit ARM: four registers of four floats.
#pragma once

#include <arm_neon.h>

namespace tiny_vllm::TINY_VLLM_ISA {
namespace {

struct Vec {
  float32x4_t v[4];
};

// Vec whose register i is f(i).
template <typename F>
inline Vec make(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}

inline Vec zero() {
  return make([](int) { return vdupq_n_f32(0); });
}
inline Vec set1(float x) {
  return make([=](int) { return vdupq_n_f32(x); });
}
inline Vec load(const float* p) {
  return make([=](int i) { return vld1q_f32(p + 4 * i); });
}
inline Vec load(const float* p, int64_t n) {
  float copy[16] = {};
  for (int64_t i = 0; i < n; ++i) copy[i] = p[i];
  return load(copy);
}
inline void store(float* p, Vec a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
inline void store(float* p, Vec a, int64_t n) {
  float copy[16];
  store(copy, a);
  for (int64_t i = 0; i < n; ++i) p[i] = copy[i];
}

inline Vec operator+(Vec a, Vec b) {
  return make([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline Vec operator-(Vec a, Vec b) {
  return make([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline Vec operator*(Vec a, Vec b) {
  return make([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline Vec operator/(Vec a, Vec b) {
  return make([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return make([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
// vmaxq_f32 would return NaN where a is NaN; Vec's max returns b there.
inline Vec max(Vec a, Vec b) {
  return make([&](int i) { return vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
inline Vec min(Vec a, Vec b) {
  return make([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
inline Vec shift_left_23(Vec a) {
  return make([&](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(a.v[i]), 23)); });
}

// A bfloat16 is the upper half of a float.
inline Vec load(const bfloat16* p) {
  const uint16_t* q = reinterpret_cast<const uint16_t*>(p);
  return make([=](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(q + 4 * i), 16)); });
}
inline Vec load(const bfloat16* p, int64_t n) {
  bfloat16 copy[16] = {};
  for (int64_t i = 0; i < n; ++i) copy[i] = p[i];
  return load(copy);
}

// Four floats rounded to bfloat16 (see to_bfloat16 in base/dtype.h).
inline uint16x4_t round_lanes(float32x4_t a) {
  const uint32x4_t u = vreinterpretq_u32_f32(a);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), rounded, quiet), 16);
}
inline void store(bfloat16* p, Vec a) {
  for (int i = 0; i < 4; ++i) vst1_u16(reinterpret_cast<uint16_t*>(p) + 4 * i, round_lanes(a.v[i]));
}
inline void store(bfloat16* p, Vec a, int64_t n) {
  bfloat16 copy[16];
  store(copy, a);
  for (int64_t i = 0; i < n; ++i) p[i] = copy[i];
}

inline float reduce_max(Vec a) {
  float lanes[16];
  store(lanes, a);
  float m = lanes[0];
  for (float lane : lanes) m = lane > m ? lane : m;
  return m;
}

// Lanes i + i+8, then i + i+4: what is left are four lanes.
inline float32x4_t fold_to_4(Vec a) { return vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3])); }
// Four values at once: lane i of the result is the sum of a[i].
inline float32x4_t reduce_4(const Vec* a) {
  const auto fold_2 = [](Vec x, Vec y) {  // lanes 0+2 and 1+3 of x, then of y
    const float64x2_t p = vreinterpretq_f64_f32(fold_to_4(x)), q = vreinterpretq_f64_f32(fold_to_4(y));
    return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(p, q)), vreinterpretq_f32_f64(vzip2q_f64(p, q)));
  };
  return vpaddq_f32(fold_2(a[0], a[1]), fold_2(a[2], a[3]));
}
inline float reduce_add(Vec a) {
  const Vec four[4] = {a, a, a, a};
  return vgetq_lane_f32(reduce_4(four), 0);
}
inline Vec reduce_add(const Vec (&a)[16]) {
  return make([&](int i) { return reduce_4(a + 4 * i); });
}

// A tile of matmul: weight rows x rows of x whose sums the registers can hold.
constexpr int kTileRows = 2, kTileCols = 2;

struct Pairs {
  Vec even, odd;
};
inline Pairs load_pairs(const bfloat16* p) {
  const uint32_t* q = reinterpret_cast<const uint32_t*>(p);
  const auto bits = [=](int i) {
    return vreinterpretq_u32_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(q + 4 * i)));
  };
  return {make([=](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(bits(i), 16)); }),
          make([=](int i) { return vreinterpretq_f32_u32(vandq_u32(bits(i), vdupq_n_u32(0xffff0000u))); })};
}
inline Pairs load_pairs(const bfloat16* p, int64_t n) {
  bfloat16 copy[32] = {};
  for (int64_t i = 0; i < n; ++i) copy[i] = p[i];
  return load_pairs(copy);
}
inline Vec dot(Vec acc, Pairs a, Pairs b) { return fma(a.odd, b.odd, fma(a.even, b.even, acc)); }

}  // namespace
}  // namespace tiny_vllm::TINY_VLLM_ISA
