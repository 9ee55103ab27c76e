// Number formats: what each element of a tensor is, and how bfloat16 and float16 become float32 and back.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace tiny_vllm {

enum class DType : uint8_t { kBFloat16, kFloat16, kFloat32 };

constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat32:
      return "float32";
  }
  return "?";
}

// The upper half of a float32: 1 sign, 8 exponent and 7 mantissa bits. Same range as float32, 2-3 decimal digits.
struct bfloat16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bfloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Rounds to nearest, ties to even, as every framework does. NaN stays NaN (a plain carry could turn it into infinity).
inline bfloat16 to_bfloat16(float x) {
  uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};
  u += 0x7fffu + ((u >> 16) & 1u);
  return {static_cast<uint16_t>(u >> 16)};
}

// IEEE 754 binary16 -> float32, exact. Checkpoints only; the engine does not compute in float16 on the CPU.
inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 0x1fu;
  const uint32_t mantissa = h & 0x3ffu;
  if (exponent == 0) return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(std::ldexp(float(mantissa), -24)));
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

template <typename T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bfloat16 from_float<bfloat16>(float x) {
  return to_bfloat16(x);
}

template <typename T>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<float>() {
  return DType::kFloat32;
}
template <>
constexpr DType dtype_of<bfloat16>() {
  return DType::kBFloat16;
}

}  // namespace tiny_vllm
