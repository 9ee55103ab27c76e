// The kernels for 64-bit ARM: four registers of 4 floats to a Vec. The compiler flags of this file are set by
// cmake/instruction_sets.cmake.
#define TINY_VLLM_ISA isa_neon
#include "cpu/kernels_impl.h"

namespace tiny_vllm {

const CpuKernels* neon_kernels() {
  static constexpr CpuKernels table = isa_neon::make_table("neon");
  return &table;
}

}  // namespace tiny_vllm
