// The kernels for AVX-512 with its bfloat16 dot product. The compiler flags of this file are set by
// cmake/instruction_sets.cmake.
#define TINY_VLLM_ISA isa_avx512_bf16
#include "cpu/kernels_impl.h"

namespace tiny_vllm {

const CpuKernels* avx512_bf16_kernels() {
  static constexpr CpuKernels table = isa_avx512_bf16::make_table("avx512_bf16");
  return &table;
}

}  // namespace tiny_vllm
