// The gate of the feed-forward layer (Shazeer, arXiv 2002.05202): activation(gate) * up.
// As in the Hugging Face models, activation(gate) is rounded to the model's dtype before the product is.
#pragma once

#include <math.h>

#include "cpu/kernels.h"
#include "cpu/vec_math.h"

namespace tiny_vllm::TINY_VLLM_ISA {
namespace {

// x * sigmoid(x)
struct Silu {
  static Vec of(Vec x) { return x * sigmoid(x); }
};

// x * Phi(x), Phi being the normal distribution (Hendrycks and Gimpel, arXiv 1606.08415).
struct Gelu {
  static Vec of(Vec x) {
    float lanes[16];
    store(lanes, x);
    for (float& lane : lanes) lane = 0.5f * lane * (1.0f + erff(lane * 0.70710678f));
    return load(lanes);
  }
};

// 0.5 x (1 + tanh(u)), which is x * sigmoid(2u), with u = sqrt(2/pi) (x + 0.044715 x³).
struct GeluTanh {
  static Vec of(Vec x) {
    const Vec cubic = fma(x * x * set1(0.044715f), x, x);
    return x * sigmoid(cubic * set1(2 * 0.79788456f));
  }
};

template <typename Act, typename T>
inline void act_mul_row(const T* gate, const T* up, T* out, int64_t width) {
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) {
    store(out + i, Act::of(load(gate + i)));
    store(out + i, load(out + i) * load(up + i));
  }
  if (i < width) {
    const int64_t n = width - i;
    store(out + i, Act::of(load(gate + i, n)), n);
    store(out + i, load(out + i, n) * load(up + i, n), n);
  }
}

template <typename T>
void act_mul(const T* gate_up, Activation activation, T* out, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row) {
    const T* gate = gate_up + row * 2 * width;
    T* result = out + row * width;
    switch (activation) {
      case Activation::kSilu:
        act_mul_row<Silu>(gate, gate + width, result, width);
        break;
      case Activation::kGelu:
        act_mul_row<Gelu>(gate, gate + width, result, width);
        break;
      case Activation::kGeluTanh:
        act_mul_row<GeluTanh>(gate, gate + width, result, width);
        break;
    }
  }
}

}  // namespace
}  // namespace tiny_vllm::TINY_VLLM_ISA
