// The kernels for AVX-512, bfloat16 widened to float. The compiler flags of this file are set by
// cmake/instruction_sets.cmake.
#define TINY_VLLM_ISA isa_avx512
#include "cpu/kernels_impl.h"

namespace tiny_vllm {

const CpuKernels* avx512_kernels() {
  static constexpr CpuKernels table = isa_avx512::make_table("avx512");
  return &table;
}

}  // namespace tiny_vllm
