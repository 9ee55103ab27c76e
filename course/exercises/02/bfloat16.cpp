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

float to_float(uint16_t bits) {
  return 0;  // Your turn. std::bit_cast<float>(word) makes a float of 32 bits.
}

uint16_t to_bfloat16(float x) {
  return 0;  // Your turn.
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
