// The kernels for Intel processors with the tile unit: as avx512_bf16, but bfloat16 matmuls and attention run on tiles.
// The compiler flags of this file are set by cmake/instruction_sets.cmake.
#define TINY_VLLM_ISA isa_amx
#include "cpu/kernels_impl.h"

#include "cpu/amx_attention.h"
#include "cpu/amx_matmul.h"

namespace tiny_vllm {

namespace {

constexpr CpuKernels make_amx_table() {
  CpuKernels table = isa_amx::make_table("amx");
  table.bf16.matmul = isa_amx::amx_matmul;
  table.bf16.attention = isa_amx::attention<bfloat16, isa_amx::AmxAttention>;
  table.bf16.packed_size = isa_amx::packed_size;
  table.bf16.pack_x = isa_amx::pack_x;
  table.bf16.columns_per_panel = isa_amx::kPanel;
  return table;
}

}  // namespace

const CpuKernels* amx_kernels() {
  static constexpr CpuKernels table = make_amx_table();
  return &table;
}

}  // namespace tiny_vllm
