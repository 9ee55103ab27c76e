// The forward pass: written once, for every family and every device.
#pragma once

#include <span>
#include <vector>

#include "backend/backend.h"
#include "model/config.h"
#include "model/rope.h"
#include "model/weights.h"

namespace tiny_vllm {

struct TransformerLimits {
  int64_t max_tokens = 0;       // T of the largest step
  int64_t max_logits_rows = 0;  // rows of logits computed at a time
  int64_t block_size = 0;       // BS
};

class Transformer {
 public:
  // Takes the weights and allocates the activations of the largest step. The KV cache comes later, with
  // allocate_kv_cache(), when it is known how much memory is left.
  Transformer(ModelConfig config, Weights weights, DType dtype, TransformerLimits limits, Backend& backend);

  void allocate_kv_cache(int64_t num_blocks);

  // Starts a step: runs all layers over its tokens, writes their keys and values into the cache, and keeps the
  // residual stream of step.logits_rows for logits(). With step.sampling, the device goes on and chooses a token for
  // each of these rows. Returns the ticket for Backend::receive(), which waits for all that.
  int64_t forward(const StepBatch& step);

  // Logits of rows [begin, begin + count) of the last step's logits_rows -> host (count, V) float32.
  // count is at most max_logits_rows.
  void logits(int64_t begin, int64_t count, float* host);

  // Copies a block's keys and values in every layer (copy-on-write).
  void copy_block(int32_t src, int32_t dst);

  const ModelConfig& config() const { return config_; }
  const Weights& weights() const { return weights_; }
  const Rope& rope() const { return rope_; }
  int64_t num_blocks() const { return num_blocks_; }
  int64_t kv_bytes_per_block() const { return config_.kv_bytes_per_token(dtype_) * limits_.block_size; }
  // Weights that a step must read: all but the rows of the embedding table that are only looked up.
  int64_t bytes_read_per_step() const;
  DType dtype() const { return dtype_; }

 private:
  void layer(int64_t l, const DeviceBatch& batch);
  Tensor compute_logits(int64_t begin, int64_t count);
  void allocate(const std::vector<Tensor*>& tensors);  // memory for tensors whose shapes are set

  ModelConfig config_;
  Weights weights_;
  DType dtype_;
  TransformerLimits limits_;
  Backend& backend_;
  Rope rope_;

  std::vector<Buffer> buffers_;  // owns the memory of the tensors below
  Tensor residual_;              // (max T, D)            the residual stream
  Tensor hidden_;                // (max T, D)            the stream normalised, where a device needs room for that
  Tensor qkv_;                   // (max T, (H+2Hk)·Dh)
  Tensor attention_;             // (max T, H·Dh)
  Tensor gate_up_;               // (max T, 2F)
  Tensor mlp_;                   // (max T, F)
  Tensor selected_;              // (max T, D)            the stream's last state, of the rows whose logits are wanted
  Tensor logits_;                // (max_logits_rows, V)  float32
  std::vector<PagedKv> kv_;      // (L)
  int64_t num_blocks_ = 0;
};

}  // namespace tiny_vllm
