// The kernels for AVX2 and FMA: two registers of 8 floats to a Vec. The compiler flags of this file are set by
// cmake/instruction_sets.cmake.
#define TINY_VLLM_ISA isa_avx2
#include "cpu/kernels_impl.h"

namespace tiny_vllm {

const CpuKernels* avx2_kernels() {
  static constexpr CpuKernels table = isa_avx2::make_table("avx2");
  return &table;
}

}  // namespace tiny_vllm
