// From a row of logits to the next token. This is the reference; a device may do the same work itself.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sample/sampling_params.h"

namespace tiny_vllm {

struct TokenLogprob {
  int32_t token = -1;
  float logprob = 0;  // natural logarithm of the probability under the raw logits
  int64_t rank = 0;   // 1: the most likely token
};

// Which random number a draw uses. The same key and position give the same draw, whatever else is in the batch.
struct RandomKey {
  uint64_t seed = 0;
  int64_t position = 0;  // of the new token in its sequence
};

class Sampler {
 public:
  // Chooses a token from logits (V).
  //
  // temperature 0 and top_k 1 are greedy: the largest logit, the lowest id among equals. Otherwise the logits are
  // divided by the temperature and filtered in vLLM's order: min_p, then top_k, then top_p over what is left; the
  // token that crosses top_p is kept. Among equal logits the lower id is kept first. The draw is an exponential
  // race: argmax of p_i / e_i with e_i ~ Exp(1), which needs no sort and no running sum and so suits every device.
  //
  // A row without probabilities has no answer: -1 is returned when it contains NaN or +infinity, or only -infinity.
  int32_t sample(std::span<const float> logits, const SamplingParams& params, const RandomKey& key);

  // The chosen token first, then the `count` most likely ones in order. logits (V).
  std::vector<TokenLogprob> logprobs(std::span<const float> logits, int32_t chosen, int64_t count) const;

 private:
  struct Candidate {
    int32_t token;
    double weight;  // probability relative to the most likely token
  };
  void keep_top_k(int64_t k);
  void keep_top_p(double p);

  std::vector<Candidate> candidates_;  // kept between calls to spare the allocation
};

// The largest logit, the lowest id among equals; -1 if any logit is NaN or the largest is not finite.
int32_t argmax(std::span<const float> logits);

}  // namespace tiny_vllm
