// What a device must offer: memory, and one function for each op of the forward pass.
//
// The CPU (cpp/cpu) and CUDA (cuda/) backends implement this interface; everything above it is written once.
// All tensors live on the backend's device, in row-major order, in the model's dtype (bfloat16 or float32)
// unless a comment says otherwise. Sums are accumulated in float32. Shapes use the letters of base/tensor.h.
// No op keeps a pointer after it returns; no op waits for the device except download(), synchronize() and receive().
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/kernel_record.h"
#include "backend/step_batch.h"
#include "base/error.h"
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

// Rows that a product reads normalised.
struct NormedRows {
  Tensor rows;    // (T, D)
  Tensor weight;  // (D)
  float eps = 0;
  Tensor room;  // (T, D) for the normalised rows; what is in it afterwards is not said
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string description() const = 0;  // one line: device, instruction set, threads
  virtual MemoryInfo memory() const = 0;
  virtual BackendDefaults defaults() const { return {}; }
  virtual int64_t padded_rows(int64_t rows) const { return rows; }  // that upload() makes of a step's rows at most
  virtual Buffer allocate(int64_t bytes) = 0;  // 64-byte aligned, contents undefined; throws OutOfMemoryError
  virtual void upload(void* device, const void* host, int64_t bytes) = 0;
  virtual void download(void* host, const void* device, int64_t bytes) = 0;
  virtual void synchronize() = 0;
  virtual DeviceBatch upload(const StepBatch& batch) = 0;

  // table (V, D)[ids (T)] -> out (T, D). A device that samples puts the token it stands for in the place of each ~i.
  virtual void embedding(const Tensor& table, const int32_t* ids, const Tensor& out) = 0;

  // x (T, D) -> out (T, D):  round(x / sqrt(mean(x²) + eps)) * weight, as Hugging Face rounds it: the normalised row
  // is rounded to the model's dtype before it is multiplied by weight (D), and the product is rounded again.
  virtual void rms_norm(const Tensor& x, const Tensor& weight, float eps, const Tensor& out) = 0;

  // x (T, K) x weight (N, K)ᵀ + bias (N) -> out (T, N). bias may be undefined. out may be float32 for any dtype of x.
  virtual void matmul(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out) = 0;

  // The same product, added to out (T, N). It may be rounded to the model's dtype before the sum is.
  virtual void matmul_add(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out) = 0;

  // rms_norm(x (T, D)) x weight (N, D)ᵀ + bias (N) -> out (T, N)
  virtual void norm_matmul(const NormedRows& x, const Tensor& weight, const Tensor& bias, const Tensor& out) {
    rms_norm(x.rows, x.weight, x.eps, x.room);
    matmul(x.room, weight, bias, out);
  }

  // act_mul(norm_matmul(...)): weight (2F, D), bias (2F) -> out (T, F). gate_up (T, 2F) is room for the product.
  virtual void norm_matmul_act_mul(const NormedRows& x, const Tensor& weight, const Tensor& bias, Activation activation,
                                   const Tensor& gate_up, const Tensor& out) {
    norm_matmul(x, weight, bias, gate_up);
    act_mul(gate_up, activation, out);
  }

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

  // ---- for a device that chooses the tokens itself, so that the next step can start before the host knows them ----

  virtual bool can_sample() const { return false; }
  virtual int32_t max_logprobs() const { return 0; }  // the largest SampleRow::num_logprobs it takes

  // Chooses a token, as Sampler does, for logits_rows [begin, begin + n) of the batch, whose logits (n, V) float32
  // these are (they may be changed). The tokens stay on the device, where token_ids of the next step can name them.
  virtual void sample(const Tensor& /*logits*/, const DeviceBatch& /*batch*/, int64_t /*begin*/) {
    TV_CHECK(false, "this backend leaves sampling to the host");
  }

  // Sends what was sampled for the step's first n logits_rows to the host, after all work that was asked for so far.
  // receive() waits for that; what it returns is valid until the next send() but one. Two may be on their way.
  virtual int64_t send(int64_t /*n*/) { return 0; }
  virtual Sampled receive(int64_t /*ticket*/) { return {}; }

  // Runs `ops`, which call ops of this backend for the batch. Batches of one shape get the same calls with the same
  // arguments, so a device may record them once and replay the record.
  virtual void run_step(const DeviceBatch& /*batch*/, const std::function<void()>& ops) { ops(); }

  // Copies block src to block dst in keys and values of one layer (copy-on-write).
  virtual void copy_block(const PagedKv& kv, int32_t src, int32_t dst) = 0;

  // With BackendOptions::profile: the kernels that ran since the last call, in order. Waits for them.
  virtual std::vector<KernelRecord> take_profile() { return {}; }
};

struct BackendOptions {
  std::string device = "auto";   // auto, cpu, cuda
  int num_threads = 0;           // CPU threads; 0: as many as this process may run on
  bool enforce_eager = false;    // never record and replay steps
  bool profile = false;          // time every kernel, for take_profile(); the CPU refuses it
  std::string cpu_isa = "auto";  // auto, amx, avx512_bf16, avx512, avx2, neon, portable, reference: for comparisons
};

// The one factory that knows which backends exist. Throws DeviceError when the device cannot be used.
std::unique_ptr<Backend> make_backend(const BackendOptions& options);

}  // namespace tiny_vllm
