// The activation functions of MLPs.
#pragma once

#include "backend/backend.h"

namespace tiny_vllm {

__device__ __forceinline__ float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kSilu:
      return x / (1 + expf(-x));
    case Activation::kGelu:
      return 0.5f * x * (1 + erff(x * 0.70710678f));  // 1/sqrt(2)
    case Activation::kGeluTanh:
      return 0.5f * x * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));  // sqrt(2/pi)
  }
  return 0;
}

}  // namespace tiny_vllm
