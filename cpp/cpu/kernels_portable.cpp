// The kernels in plain C++, for any processor.
#define TINY_VLLM_ISA isa_portable
#define TINY_VLLM_PORTABLE
#include "cpu/kernels_impl.h"

namespace tiny_vllm {

const CpuKernels* portable_kernels() {
  static constexpr CpuKernels table = isa_portable::make_table("portable");
  return &table;
}

}  // namespace tiny_vllm
