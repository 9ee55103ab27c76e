// config.json -> ModelConfig: everything that the forward pass needs to know about a model, checked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/dtype.h"

namespace tiny_vllm {

enum class RopeType : uint8_t { kDefault, kLinear, kDynamic, kLlama3, kYarn };

// Rotary position embedding (Su et al., arXiv 2104.09864) and the ways to stretch it.
struct RopeConfig {
  RopeType type = RopeType::kDefault;
  double theta = 10000.0;
  double factor = 1.0;
  int64_t original_max_position = 0;  // dynamic, llama3, yarn
  double low_freq_factor = 1.0;       // llama3
  double high_freq_factor = 4.0;      // llama3
  double attention_factor = 1.0;      // yarn: multiplies cos and sin
  double beta_fast = 32.0;            // yarn
  double beta_slow = 1.0;             // yarn
  bool truncate = true;               // yarn: round the borders of the ramp to whole dimensions
};

struct ModelConfig {
  std::string model_type;  // as in config.json
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t vocab_size = 0;
  int64_t max_position_embeddings = 0;
  float rms_norm_eps = 1e-6f;
  Activation activation = Activation::kSilu;
  RopeConfig rope;
  bool tie_word_embeddings = false;
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;
  std::vector<int64_t> sliding_window;  // (L) window of each layer in tokens, 0: none

  int64_t qkv_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
  int64_t kv_bytes_per_token(DType dtype) const { return 2 * num_layers * num_kv_heads * head_dim * size_of(dtype); }
};

// Parses and checks config.json. `source` names the file in error messages. Throws ModelLoadError: unknown family,
// unknown rope type, a missing or impossible field, each by name.
ModelConfig parse_config(const std::string& json_text, const std::string& source);

// The families of the table in config.cpp, for messages and `tiny-vllm info`.
std::vector<std::string> supported_model_types();

}  // namespace tiny_vllm
