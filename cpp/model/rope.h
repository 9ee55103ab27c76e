// The angles of rotary position embedding: cos and sin of position × frequency, for each pair of elements of a head.
//
// RoFormer, Su et al., arXiv 2104.09864. Ways to stretch it past the trained length: linear (Chen et al.,
// arXiv 2306.15595), dynamic NTK, YaRN (Peng et al., arXiv 2309.00071) and the bands of Llama 3.1.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config.h"

namespace tiny_vllm {

// Follows the arithmetic of transformers (modeling_rope_utils.py) step by step, in float32 where it uses float32: at
// position 100,000 one more bit in a frequency is already a visible change of angle.
class Rope {
 public:
  explicit Rope(const RopeConfig& config, int64_t head_dim, int64_t max_position_embeddings);

  // Writes (Dh/2, 2): cos and sin for each pair. sequence_length counts the tokens of the request that are known when
  // this position is computed; only dynamic scaling looks at it.
  // Angles once computed are kept, so two threads must not call this at the same time.
  void cos_sin(int32_t position, int64_t sequence_length, float* out) const;

  // Frequencies (Dh/2) in radians a token, for a sequence of this length.
  const std::vector<float>& inv_freq(int64_t sequence_length) const;

  // True: keys that were computed at different sequence lengths are rotated by different angles.
  bool depends_on_length() const { return config_.type == RopeType::kDynamic; }

  float attention_scaling() const { return attention_scaling_; }  // cos and sin are multiplied by it

 private:
  void compute(int32_t position, const std::vector<float>& frequencies, float* out) const;

  RopeConfig config_;
  int64_t head_dim_ = 0;
  float attention_scaling_ = 1.0f;
  std::vector<float> inv_freq_;       // (Dh/2)
  mutable std::vector<float> table_;  // (positions, Dh/2, 2) what cos_sin() gave so far; not with dynamic scaling
  mutable std::vector<float> long_inv_freq_;  // (Dh/2) dynamic: for long_length_
  mutable int64_t long_length_ = 0;
};

}  // namespace tiny_vllm
