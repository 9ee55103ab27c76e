// The table of compute kernels: what an instruction set must offer for one element type T (bfloat16 or float).
//
// kernels_<isa>.cpp fill one table each from the same source; reference.cpp fills one with plain loops.
// Kernels know nothing of threads: each takes the part of the work that its caller gives it. Row-major everywhere.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace tiny_vllm {

// x (M, K) x weight (N, K)ᵀ + bias (N) -> out (M, N)
template <typename T>
struct MatmulArgs {
  const T* x = nullptr;
  const T* weight = nullptr;
  const T* bias = nullptr;  // may be null
  void* out = nullptr;      // T, or float when out_is_float
  bool out_is_float = false;
  bool add = false;             // out += the product, which is rounded to T first
  const T* packed_x = nullptr;  // x as pack_x() left it, for tables that have one
  int64_t m = 0, n = 0, k = 0;
};

template <typename T>
struct RopeArgs {
  T* qkv = nullptr;           // (T, (H+2Hk)·Dh)
  const T* q_norm = nullptr;  // (Dh) or null
  const T* k_norm = nullptr;  // (Dh) or null
  float eps = 0;
  const float* cos_sin = nullptr;         // (T, Dh/2, 2)
  const int64_t* slot_mapping = nullptr;  // (T)
  AttentionShape shape;
  T* keys = nullptr;    // (NB, Hk, BS, Dh)
  T* values = nullptr;  // (NB, Hk, BS, Dh)
};

template <typename T>
struct AttentionArgs {
  const T* qkv = nullptr;  // (T, (H+2Hk)·Dh)
  const int32_t* query_start = nullptr;
  const int32_t* context_len = nullptr;
  const int32_t* block_tables = nullptr;
  int64_t block_table_width = 0;
  AttentionShape shape;
  const T* keys = nullptr;
  const T* values = nullptr;
  T* out = nullptr;  // (T, H·Dh)

  int64_t group() const { return shape.num_heads / shape.num_kv_heads; }  // query heads that share one KV head
};

// Long contexts are cut at multiples of kKeySplit keys, counted from the first token of the request. Each part is
// attended to alone and the parts are merged in order, always, so that it makes no difference to a single bit whether
// one thread does all the parts or each part has its own.
constexpr int64_t kKeySplit = 256;

constexpr int64_t kMaxHeadDim = 512;

// The most query rows of one item.
constexpr int64_t kQueryRows = 64;

// Some rows of one request and one KV head, against some of the context.
// Row i of a request is query head i % G (of the G that share the KV head) of its token i / G.
struct AttentionItem {
  int64_t request = 0;
  int64_t kv_head = 0;
  int64_t row_begin = 0, row_end = 0;      // at most kQueryRows
  int64_t split_begin = 0, split_end = 0;  // in units of kKeySplit keys
  float* partial = nullptr;                // (rows, partial_floats) of one split; null: write to out
};

// Room for one row of unfinished output: Dh, and zeros up to whole vectors.
constexpr int64_t padded_head_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

// An unfinished row on its way to attention_merge: out, max, sum.
constexpr int64_t partial_floats(int64_t head_dim) { return padded_head_dim(head_dim) + 2; }

// Floats that one thread needs to work on an item.
constexpr int64_t attention_scratch_floats(int64_t head_dim) {
  return kQueryRows * (4 * (padded_head_dim(head_dim) + 32) + 2 * kQueryRows);
}

template <typename T>
struct Kernels {
  // Columns [n_begin, n_end) of out, for all rows.
  void (*matmul)(const MatmulArgs<T>& args, int64_t n_begin, int64_t n_end);

  // rows of x (rows, D) -> out
  void (*rms_norm)(const T* x, const T* weight, float eps, T* out, int64_t rows, int64_t dim);

  // Tokens [begin, end).
  void (*rope_and_cache)(const RopeArgs<T>& args, int64_t begin, int64_t end);

  void (*attention)(const AttentionArgs<T>& args, const AttentionItem& item, float* scratch);

  // Merges the partials (splits, rows, partial_floats) of an item, in order, and writes its rows of out.
  // Null: this table does not split.
  void (*attention_merge)(const AttentionArgs<T>& args, const AttentionItem& item, const float* partials,
                          int64_t splits, float* scratch);

  // gate_up (rows, 2F) -> out (rows, F)
  void (*act_mul)(const T* gate_up, Activation activation, T* out, int64_t rows, int64_t width);

  // Columns of a matmul are handed out in multiples of this.
  int64_t columns_per_panel = 16;

  // Where the matmul wants x in another order: how many elements that takes, and groups [begin, end) of 16 rows put in
  // that order. Null: it takes x as it is.
  int64_t (*packed_size)(int64_t m, int64_t k) = nullptr;
  void (*pack_x)(const MatmulArgs<T>& args, T* packed, int64_t group_begin, int64_t group_end) = nullptr;
};

struct CpuKernels {
  const char* name = "";
  Kernels<bfloat16> bf16;
  Kernels<float> fp32;

  // XOR of a buffer, read once from end to end: how fast can this processor read?
  uint64_t (*read_all)(const void* data, int64_t bytes) = nullptr;

  template <typename T>
  const Kernels<T>& of() const {
    if constexpr (dtype_of<T>() == DType::kFloat32) {
      return fp32;
    } else {
      return bf16;
    }
  }
};

// One for each kernels_<isa>.cpp of the build.
const CpuKernels* reference_kernels();
const CpuKernels* portable_kernels();
const CpuKernels* avx2_kernels();
const CpuKernels* avx512_kernels();
const CpuKernels* avx512_bf16_kernels();
const CpuKernels* amx_kernels();
const CpuKernels* neon_kernels();

// The names that select_kernels() accepts on this machine, best first; "reference" is last.
std::vector<std::string> available_isas();

// The table of that name; "auto" is the best one that this processor can run. Throws DeviceError for a name that is
// unknown or that this processor cannot run.
const CpuKernels& select_kernels(const std::string& isa);

}  // namespace tiny_vllm
