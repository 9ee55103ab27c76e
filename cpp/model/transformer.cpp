#include "model/transformer.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace tiny_vllm {

namespace {
constexpr int64_t kAlignment = 64;  // bytes: a cache line, and the widest vector register
}  // namespace

Transformer::Transformer(ModelConfig config, Weights weights, DType dtype, TransformerLimits limits, Backend& backend)
    : config_(std::move(config)),
      weights_(std::move(weights)),
      dtype_(dtype),
      limits_(limits),
      backend_(backend),
      rope_(config_.rope, config_.head_dim, config_.max_position_embeddings) {
  const int64_t T = backend.padded_rows(limits.max_tokens), D = config_.hidden_size, F = config_.intermediate_size;
  residual_ = Tensor(nullptr, dtype, {T, D});
  hidden_ = Tensor(nullptr, dtype, {T, D});
  qkv_ = Tensor(nullptr, dtype, {T, config_.qkv_size()});
  attention_ = Tensor(nullptr, dtype, {T, config_.num_heads * config_.head_dim});
  gate_up_ = Tensor(nullptr, dtype, {T, 2 * F});
  mlp_ = Tensor(nullptr, dtype, {T, F});
  selected_ = Tensor(nullptr, dtype, {T, D});
  logits_ = Tensor(nullptr, DType::kFloat32, {backend.padded_rows(limits.max_logits_rows), config_.vocab_size});
  allocate({&residual_, &hidden_, &qkv_, &attention_, &gate_up_, &mlp_, &selected_, &logits_});
}

// One allocation for all of them: a machine that promises more memory than it has would grant each of many.
void Transformer::allocate(const std::vector<Tensor*>& tensors) {
  const auto aligned = [](int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; };
  int64_t bytes = 0;
  for (const Tensor* t : tensors) bytes += aligned(t->nbytes());
  buffers_.push_back(backend_.allocate(bytes));
  char* next = static_cast<char*>(buffers_.back().get());
  for (Tensor* t : tensors) {
    t->data = next;
    next += aligned(t->nbytes());
  }
}

void Transformer::allocate_kv_cache(int64_t num_blocks) {
  TV_CHECK(num_blocks > 0 && kv_.empty(), "the KV cache is allocated once, with at least one block");
  num_blocks_ = num_blocks;
  kv_.resize(config_.num_layers);
  std::vector<Tensor*> tensors;
  for (PagedKv& kv : kv_) {
    for (Tensor* t : {&kv.keys, &kv.values}) {
      *t = Tensor(nullptr, dtype_, {num_blocks, config_.num_kv_heads, limits_.block_size, config_.head_dim});
      tensors.push_back(t);
    }
  }
  allocate(tensors);
}

int64_t Transformer::forward(const StepBatch& step) {
  TV_CHECK(step.num_tokens() > 0 && step.num_tokens() <= limits_.max_tokens, "a step of ", step.num_tokens(),
           " tokens; the buffers hold ", limits_.max_tokens);
  const DeviceBatch batch = backend_.upload(step);
  const int64_t T = batch.num_tokens, n = batch.num_logits_rows;

  backend_.run_step(batch, [&] {
    const Tensor residual = residual_.rows(0, T);
    backend_.embedding(weights_.embedding, batch.token_ids, residual);  // ids (T) -> (T, D)
    for (int64_t l = 0; l < config_.num_layers; ++l) layer(l, batch);

    if (n == 0) return;  // chunks in the middle of a prompt: the cache is all that was wanted
    backend_.gather_rows(residual, batch.logits_rows, selected_.rows(0, n));  // (T, D) -> (n, D)

    if (step.sampling.empty()) return;
    for (int64_t begin = 0; begin < n; begin += logits_.shape[0])
      backend_.sample(compute_logits(begin, std::min(logits_.shape[0], n - begin)), batch, begin);
  });
  return backend_.send(step.sampling.empty() ? 0 : std::ssize(step.logits_rows));
}

void Transformer::layer(int64_t l, const DeviceBatch& batch) {
  const LayerWeights& w = weights_.layers[l];
  const int64_t T = batch.num_tokens;
  const float eps = config_.rms_norm_eps;
  const Tensor residual = residual_.rows(0, T), hidden = hidden_.rows(0, T), qkv = qkv_.rows(0, T);
  const Tensor attention = attention_.rows(0, T), gate_up = gate_up_.rows(0, T), mlp = mlp_.rows(0, T);

  AttentionShape shape;
  shape.num_heads = config_.num_heads;
  shape.num_kv_heads = config_.num_kv_heads;
  shape.head_dim = config_.head_dim;
  shape.block_size = limits_.block_size;
  shape.sliding_window = config_.sliding_window[l];
  shape.scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim));

  // Each half of a layer reads the residual stream (T, D), normalised, and adds what it finds to it.
  backend_.norm_matmul({residual, w.attn_norm, eps, hidden}, w.qkv, w.qkv_bias, qkv);  // -> (T, (H+2Hk)·Dh)
  backend_.rope_and_cache(qkv, w.q_norm, w.k_norm, eps, batch, shape, kv_[l]);
  backend_.paged_attention(qkv, batch, shape, kv_[l], attention);  // -> (T, H·Dh)
  backend_.matmul_add(attention, w.o, w.o_bias, residual);         // (T, H·Dh) x (D, H·Dh)ᵀ -> (T, D)

  backend_.norm_matmul_act_mul({residual, w.mlp_norm, eps, hidden}, w.gate_up, w.gate_up_bias, config_.activation,
                               gate_up, mlp);               // (T, D) x (2F, D)ᵀ -> (T, 2F) -> (T, F)
  backend_.matmul_add(mlp, w.down, w.down_bias, residual);  // (T, F) x (D, F)ᵀ -> (T, D)
}

Tensor Transformer::compute_logits(int64_t begin, int64_t count) {
  TV_CHECK(count <= logits_.shape[0], count, " rows of logits; the buffer holds ", logits_.shape[0]);
  const Tensor out = logits_.rows(0, count);
  const NormedRows rows{selected_.rows(begin, count), weights_.final_norm, config_.rms_norm_eps,
                        hidden_.rows(0, count)};
  backend_.norm_matmul(rows, weights_.lm_head, Tensor(), out);  // (n, D) x (V, D)ᵀ -> (n, V)
  return out;
}

void Transformer::logits(int64_t begin, int64_t count, float* host) {
  const Tensor out = compute_logits(begin, count);
  backend_.download(host, out.data, out.nbytes());
}

void Transformer::copy_block(int32_t src, int32_t dst) {
  for (const PagedKv& kv : kv_) backend_.copy_block(kv, src, dst);
}

int64_t Transformer::bytes_read_per_step() const {
  return config_.tie_word_embeddings ? weights_.bytes : weights_.bytes - weights_.embedding.nbytes();
}

}  // namespace tiny_vllm
