// The launchers of all kernels. Each lies in the .cu file of its name, beside the kernel.
//
// T is bfloat16 or float32; sums are float32. Shapes use the letters of base/tensor.h.
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "launch.h"

namespace tiny_vllm {

// x (?, D)[rows (n)] -> out (n, D), row_bytes = D * size of an element. A negative row number leaves zeros.
void gather_rows(const Stream& stream, const void* x, const int32_t* rows, void* out, int64_t n, int64_t row_bytes);

// table (V, D)[ids (n)] -> out (n, D). An id ~i < 0 becomes sampled[i], also in `ids`; zeros where that is negative.
void embedding(const Stream& stream, const void* table, int32_t* ids, const int32_t* sampled, void* out, int64_t n,
               int64_t row_bytes);

// out (rows, D) = norm of x (rows, D)
template <typename T>
void rms_norm(const Stream& stream, const T* x, const T* weight, float eps, T* out, int64_t rows, int64_t dim);

template <typename T>
struct RopeAndCacheArgs {
  T* qkv = nullptr;           // (T, (H+2Hk)·Dh)
  const T* q_norm = nullptr;  // (Dh) or null
  const T* k_norm = nullptr;  // (Dh) or null
  float eps = 0;
  const float* cos_sin = nullptr;         // (T, Dh/2, 2)
  const int64_t* slot_mapping = nullptr;  // (T); a negative slot is padding: nothing is written
  int64_t num_tokens = 0;
  AttentionShape shape;
  T* keys = nullptr;    // (NB, Hk, BS, Dh)
  T* values = nullptr;  // (NB, Hk, BS, Dh)
};
template <typename T>
void rope_and_cache(const Stream& stream, const RopeAndCacheArgs<T>& args);

// gate_up (rows, 2F) -> out (rows, F)
template <typename T>
void act_mul(const Stream& stream, const T* gate_up, Activation activation, T* out, int64_t rows, int64_t width);

template <typename T>
struct AttentionArgs {
  const T* qkv = nullptr;                 // (T, (H+2Hk)·Dh)
  const int32_t* query_start = nullptr;   // (R+1)
  const int32_t* context_len = nullptr;   // (R); 0: no key is seen, and the result is 0
  const int32_t* block_tables = nullptr;  // (R, B)
  int64_t block_table_width = 0;
  int64_t num_blocks = 0;  // of the cache
  int64_t num_tokens = 0;
  int64_t num_requests = 0;
  int64_t max_context = 0;  // no context_len is larger
  AttentionShape shape;
  const T* keys = nullptr;
  const T* values = nullptr;
  T* out = nullptr;                 // (T, H·Dh)
  const StepBatch* host = nullptr;  // the step, on the host: for attention_work() alone, and null where nobody profiles

  int64_t group() const { return shape.num_heads / shape.num_kv_heads; }
};

// Any dtype, any head_dim up to 512: what runs float32 and odd sizes. All requests of the batch.
template <typename T>
void attention_plain(const Stream& stream, const AttentionArgs<T>& args);

// bfloat16 on tensor cores, head_dim a multiple of 8 up to 256. attention_prefill does the requests with more than one
// query token and attention_decode those with one; neither touches the other's rows.
void attention_prefill(const Stream& stream, const AttentionArgs<bfloat16>& args);
// The same for compute capability 9.0a, head_dim 64 or 128.
bool attention_prefill_hopper_takes(const Stream& stream, const AttentionArgs<bfloat16>& args);
void attention_prefill_hopper(const Stream& stream, const AttentionArgs<bfloat16>& args);

struct DecodeScratch {
  int64_t partial_floats = 0;  // unfinished rows
  int64_t counters = 0;        // unsigned; zero before the first call, and left so by each
};
DecodeScratch attention_decode_scratch(const Stream& stream, int64_t num_requests, int64_t max_context,
                                       const AttentionShape& shape);
void attention_decode(const Stream& stream, const AttentionArgs<bfloat16>& args, float* partials, unsigned* counters);

// Applies allowed sets and biases to logits.
struct EditArgs {
  float* logits = nullptr;            // (n, V)
  const SampleRow* rows = nullptr;    // (n)
  const TokenBias* biases = nullptr;  // row r has [starts[r], starts[r + 1])
  const int32_t* starts = nullptr;    // (n+1), or null: no row has biases
  const uint32_t* allowed = nullptr;  // (k, ceil(V / 32)) the sets that rows[r].allowed counts
  int64_t n = 0;
  int64_t vocab_size = 0;
};
void edit_logits(const Stream& stream, const EditArgs& args);

// Copies the rows with num_logprobs >= 0 to raw (n, V).
void keep_raw(const Stream& stream, const float* logits, const SampleRow* rows, float* raw, int64_t n,
              int64_t vocab_size);

// Changes logits as Sampler (cpp/sample) does before it samples. Rows whose penalties change nothing are left alone.
struct PenaltyArgs {
  float* logits = nullptr;               // (n, V)
  const SampleRow* rows = nullptr;       // (n)
  const TokenCount* counts = nullptr;    // each token of a row once, but for what its last token adds
  const int32_t* starts = nullptr;       // (n+1) row r has counts [starts[r], starts[r + 1])
  const int32_t* last_tokens = nullptr;  // (n) one more token of the row: of its output or its prompt, as
                                         //     rows[r].last_is_output says; negative: none
  int64_t n = 0;
  int64_t vocab_size = 0;
};
inline __host__ __device__ bool has_penalties(const SampleRow& row) {
  return row.repetition_penalty != 1 || row.frequency_penalty != 0 || row.presence_penalty != 0;
}
void penalize(const Stream& stream, const PenaltyArgs& args);

// A token for each row of logits, as Sampler (cpp/sample) chooses it; -1 where there is no answer.
struct SamplingArgs {
  const float* logits = nullptr;    // (n, V)
  const SampleRow* rows = nullptr;  // (n)
  int64_t n = 0;
  int64_t vocab_size = 0;
  uint64_t* cuts = nullptr;      // (n), or null when no row has a filter
  void* partials = nullptr;      // sampling_partial_bytes()
  unsigned* counters = nullptr;  // (n), zero before the first call, and left so by each
  int32_t* tokens = nullptr;     // (n)
};
__host__ __device__ inline bool is_greedy(const SampleRow& row) { return row.temperature == 0 || row.top_k == 1; }
__host__ __device__ inline bool has_filter(const SampleRow& row, int64_t vocab_size) {
  return !is_greedy(row) && (row.min_p > 0 || (row.top_k > 0 && row.top_k < vocab_size) || row.top_p < 1);
}
int64_t sampling_partial_bytes(const Stream& stream, int64_t n);
void sample_rows(const Stream& stream, const SamplingArgs& args);

// What Sampler::logprobs (cpp/sample) reports of each row: the chosen token, then the most likely ones in order, as
// many as rows[r].num_logprobs says, or all of the vocabulary. The rest of a row of `out` is left as it was, and so is
// all of it where num_logprobs or the token is negative.
constexpr int kMaxLogprobs = 64;  // num_logprobs is not larger
struct LogprobsArgs {
  const float* logits = nullptr;    // (n, V)
  const SampleRow* rows = nullptr;  // (n)
  const int32_t* tokens = nullptr;  // (n)
  int64_t n = 0;
  int64_t vocab_size = 0;
  DeviceLogprob* out = nullptr;  // (n, kMaxLogprobs + 1)
};
void logprobs(const Stream& stream, const LogprobsArgs& args);

// A product of a few rows, with what stands before and after it: K a multiple of 8.
//   y = x (M, K), or with a norm_weight the RMS norm of its rows
//   p = y · weight (N, K)ᵀ + bias (N)
//   out = p (M, N), or out += p, or out (M, N/2) = activation(first half of p) · second half
struct GemvArgs {
  enum Epilogue { kStore, kStoreFloat, kAdd, kActMul };  // out is bfloat16, or float where it says so
  const bfloat16* x = nullptr;
  const bfloat16* norm_weight = nullptr;  // (K) or null
  float eps = 0;
  const bfloat16* weight = nullptr;
  const bfloat16* bias = nullptr;  // or null
  Epilogue epilogue = kStore;
  Activation activation = Activation::kSilu;
  void* out = nullptr;
  int64_t m = 0, n = 0, k = 0;
};
bool gemv_takes(int64_t m, int64_t n, int64_t k);
bool gemv_norm_takes(int64_t m, int64_t n, int64_t k);  // with a norm_weight
void gemv(const Stream& stream, const GemvArgs& args);

}  // namespace tiny_vllm
