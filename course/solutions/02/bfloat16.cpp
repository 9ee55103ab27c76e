// Exercise 2.1: float32 to bfloat16 and back, in bits.
//
//   to_float       the bfloat16 with these 16 bits, as a float32: exact
//   to_bfloat16    the nearest bfloat16; of two that are equally near, the one whose last bit is 0
//
// What is above the largest bfloat16 by half a gap or more becomes infinity, with its sign. NaN stays NaN: any NaN will
// do. Do not use a bfloat16 type of the compiler.
#include <bit>
#include <cstdint>

#include "simt.h"

float to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }

uint16_t to_bfloat16(float x) {
  const uint32_t word = std::bit_cast<uint32_t>(x);
  // NaN: exponent all ones, mantissa not 0. Its upper half may be that of infinity, so a bit is set there.
  if ((word & 0x7fffffffu) > 0x7f800000u) return uint16_t(word >> 16 | 0x40u);
  // Half a gap is 0x8000. A little less is added, and 1 more if the last bit that stays is 1: so a tie goes up then,
  // and else it does not. A carry out of the mantissa raises the exponent, which is right, and out of the largest
  // exponent gives infinity, which is right too.
  return uint16_t((word + 0x7fffu + (word >> 16 & 1u)) >> 16);
}

// What the test calls: n numbers at once.
extern "C" const char* widen(const uint16_t* bits, float* out, int n) {
  return report([&] {
    for (int i = 0; i < n; ++i) out[i] = to_float(bits[i]);
  });
}

extern "C" const char* round_all(const float* x, uint16_t* out, int n) {
  return report([&] {
    for (int i = 0; i < n; ++i) out[i] = to_bfloat16(x[i]);
  });
}
