// What a device must offer: memory, and one function for each op of the forward pass.
//
// The CPU (cpp/cpu) and CUDA (cuda/) backends implement this interface; everything above it is written once.
// All tensors live on the backend's device, in row-major order, in the model's dtype (bfloat16 or float32)
// unless a comment says otherwise. Sums are accumulated in float32. Shapes use the letters of base/tensor.h.
// No op keeps a pointer after it returns; no op waits for the device except download() and synchronize().
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/tensor.h"

namespace tiny_vllm {

// Device memory that frees itself. The deleter belongs to the backend that made it.
using Buffer = std::shared_ptr<void>;

struct MemoryInfo {
  int64_t total_bytes = 0;
  int64_t available_bytes = 0;
};

// Engine options that depend on the device when nobody sets them.
struct BackendDefaults {
  double memory_utilization = 0.5;       // share of the free memory for the KV cache
  int64_t max_num_seqs = 64;             // a step should read the weights for many,
  int64_t max_num_batched_tokens = 512;  // and compute enough to be worth it, but not make the others wait
};

enum class Activation : uint8_t { kSilu, kGelu, kGeluTanh };

// The tokens of one step, flat: request r owns rows [query_start[r], query_start[r + 1]) and no row is padding.
// A row may be a decode, part of a prefill chunk, or the recomputation of a preempted request: all are the same thing.
struct StepBatch {
  std::vector<int32_t> token_ids;     // (T)
  std::vector<int32_t> positions;     // (T)    position of the token in its request
  std::vector<int64_t> slot_mapping;  // (T)    where its key and value go: block * BS + offset
  std::vector<int32_t> query_start;   // (R+1)  first row of each request, then T
  std::vector<int32_t> context_len;   // (R)    keys that the request's last row sees, this step's included
  std::vector<int32_t> block_tables;  // (R, B) blocks of each request in order; the tail of a row is unused
  int64_t block_table_width = 0;      // B
  std::vector<float> cos_sin;         // (T, Dh/2, 2) rotary angles of each row: cos, sin
  std::vector<int32_t> logits_rows;   // rows whose logits are wanted

  int64_t num_tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t num_requests() const { return static_cast<int64_t>(context_len.size()); }
};

// The same arrays, on the device. Valid until the next upload(). A device may have added rows of padding at the end,
// each a request of one token without context (context_len 0, slot -1): ops compute something for them and write no
// cache.
struct DeviceBatch {
  int64_t num_tokens = 0;
  int64_t num_requests = 0;
  int64_t num_logits_rows = 0;
  int64_t block_table_width = 0;
  const int32_t* token_ids = nullptr;
  const int32_t* positions = nullptr;
  const int64_t* slot_mapping = nullptr;
  const int32_t* query_start = nullptr;
  const int32_t* context_len = nullptr;
  const int32_t* block_tables = nullptr;
  const float* cos_sin = nullptr;
  const int32_t* logits_rows = nullptr;
  const StepBatch* host = nullptr;  // for grid sizes and work lists
};

// One layer's paged KV cache. The keys of one head in one block are BS·Dh contiguous numbers: one tile.
struct PagedKv {
  Tensor keys;    // (NB, Hk, BS, Dh)
  Tensor values;  // (NB, Hk, BS, Dh)
};

struct AttentionShape {
  int64_t num_heads = 0;       // H
  int64_t num_kv_heads = 0;    // Hk
  int64_t head_dim = 0;        // Dh
  int64_t block_size = 0;      // BS
  int64_t sliding_window = 0;  // a query sees itself and this many minus one keys before it; 0: all of them
  float scale = 0;             // of the scores, usually 1/sqrt(Dh)
};

// How a row of logits becomes a token: the fields that Sampler (cpp/sample) reads.
struct SampleRow {
  double temperature = 1;
  int64_t top_k = 0;
  double top_p = 1;
  double min_p = 0;
  uint64_t seed = 0;
  int64_t position = 0;
  double repetition_penalty = 1;
  double presence_penalty = 0;
  double frequency_penalty = 0;
  bool last_is_output = false;  // the row's last token was generated, and does not come from the prompt
  int32_t num_logprobs = -1;    // most likely tokens to report beside the chosen one; -1: none, nor the chosen one
};

// How often a row's request has a token: `count` times in its output, 0 when in its prompt only.
struct TokenCount {
  int32_t token = 0;
  int32_t count = 0;
};

// TokenLogprob (cpp/sample) as a device writes it.
struct DeviceLogprob {
  int32_t token = -1;
  float logprob = 0;
  int32_t rank = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string description() const = 0;  // one line: device, instruction set, threads
  virtual MemoryInfo memory() const = 0;
  virtual BackendDefaults defaults() const { return {}; }
  virtual int64_t max_padding() const { return 0; }  // rows that upload() adds to a step at most
  virtual Buffer allocate(int64_t bytes) = 0;        // 64-byte aligned, contents undefined; throws OutOfMemoryError
  virtual void upload(void* device, const void* host, int64_t bytes) = 0;
  virtual void download(void* host, const void* device, int64_t bytes) = 0;
  virtual void fill_zero(void* device, int64_t bytes) = 0;
  virtual void synchronize() = 0;
  virtual DeviceBatch upload(const StepBatch& batch) = 0;

  // table (V, D)[ids (T)] -> out (T, D)
  virtual void embedding(const Tensor& table, const int32_t* ids, const Tensor& out) = 0;

  // x (T, D) -> out (T, D):  round(x / sqrt(mean(x²) + eps)) * weight, as Hugging Face rounds it: the normalised row
  // is rounded to the model's dtype before it is multiplied by weight (D), and the product is rounded again.
  virtual void rms_norm(const Tensor& x, const Tensor& weight, float eps, const Tensor& out) = 0;

  // residual (T, D) += x (T, D), rounded to the model's dtype; then out = rms_norm(residual). x and out may be the
  // same memory.
  virtual void add_rms_norm(const Tensor& residual, const Tensor& x, const Tensor& weight, float eps,
                            const Tensor& out) = 0;

  // x (T, K) x weight (N, K)ᵀ + bias (N) -> out (T, N). bias may be undefined. out may be float32 for any dtype of x.
  virtual void matmul(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out) = 0;

  // qkv (T, (H+2Hk)·Dh): normalises each query and key head when q_norm, k_norm (Dh) are defined (as rms_norm does),
  // rotates queries and keys (half-split: element i pairs with i + Dh/2), leaves the queries in place and writes keys
  // and values into the cache at slot_mapping.
  virtual void rope_and_cache(const Tensor& qkv, const Tensor& q_norm, const Tensor& k_norm, float eps,
                              const DeviceBatch& batch, const AttentionShape& shape, const PagedKv& kv) = 0;

  // Causal attention of the queries in qkv (T, (H+2Hk)·Dh) over the paged cache -> out (T, H·Dh).
  virtual void paged_attention(const Tensor& qkv, const DeviceBatch& batch, const AttentionShape& shape,
                               const PagedKv& kv, const Tensor& out) = 0;

  // gate_up (T, 2F) -> out (T, F):  activation(gate) * up
  virtual void act_mul(const Tensor& gate_up, Activation activation, const Tensor& out) = 0;

  // x (T, D)[rows (n)] -> out (n, D)
  virtual void gather_rows(const Tensor& x, const int32_t* rows, const Tensor& out) = 0;

  // Chooses a token from each row of logits (n, V) float32 as Sampler does, -1 for a row with NaN, and waits for it.
  // False, and nothing done: the host should do it.
  virtual bool sample(const Tensor& /*logits*/, std::span<const SampleRow> /*rows*/, int32_t* /*tokens*/) {
    return false;
  }

  // Runs `ops`, which call ops of this backend for the batch. Batches of one shape get the same calls with the same
  // arguments, so a device may record them once and replay the record.
  virtual void run_step(const DeviceBatch& /*batch*/, const std::function<void()>& ops) { ops(); }

  // Copies block src to block dst in keys and values of one layer (copy-on-write).
  virtual void copy_block(const PagedKv& kv, int32_t src, int32_t dst) = 0;
};

struct BackendOptions {
  std::string device = "auto";   // auto, cpu, cuda
  int num_threads = 0;           // CPU threads; 0: as many as this process may run on
  bool enforce_eager = false;    // never record and replay steps
  std::string cpu_isa = "auto";  // auto, amx, avx512_bf16, avx512, avx2, neon, portable, reference: for comparisons
};

// The one factory that knows which backends exist. Throws DeviceError when the device cannot be used.
std::unique_ptr<Backend> make_backend(const BackendOptions& options);

}  // namespace tiny_vllm
