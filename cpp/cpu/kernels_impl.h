// All kernels of one instruction set, gathered into its table. Included once by each kernels_<isa>.cpp.
#pragma once

#include "cpu/act_mul_kernel.h"
#include "cpu/attention_kernel.h"
#include "cpu/matmul_kernel.h"
#include "cpu/rms_norm_kernel.h"
#include "cpu/rope_kernel.h"

namespace tiny_vllm::TINY_VLLM_ISA {
namespace {

uint64_t read_all(const void* data, int64_t bytes) {
  const uint64_t* p = static_cast<const uint64_t*>(data);
  uint64_t sums[32] = {};
  for (int64_t i = 0; i + 32 <= bytes / 8; i += 32) {
    for (int j = 0; j < 32; ++j) sums[j] ^= p[i + j];
  }
  uint64_t sum = 0;
  for (uint64_t s : sums) sum ^= s;
  return sum;
}

template <typename T>
constexpr Kernels<T> kernels_of() {
  return {matmul<T>, rms_norm<T>, rope_and_cache<T>, attention<T, VectorAttention>, attention_merge<T>, act_mul<T>};
}

constexpr CpuKernels make_table(const char* name) {
  return {name, kernels_of<bfloat16>(), kernels_of<float>(), read_all};
}

}  // namespace
}  // namespace tiny_vllm::TINY_VLLM_ISA
