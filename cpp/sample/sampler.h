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

// What the choice depends on beside the logits and the parameters. Penalties look at all of the prompt, whoever
// computed it, and at what has been generated.
struct SampleContext {
  std::span<const int32_t> prompt;
  std::span<const int32_t> output;
  std::span<const int32_t> end_tokens = {};  // what ends the output by itself: min_tokens keeps them away
  std::span<const uint32_t> allowed = {};    // tokens that may be chosen, a bit each, (ceil(V / 32)); empty: all
};

class Sampler {
 public:
  // Chooses a token from logits (V).
  //
  // First the logits are changed, in a copy: by what logit_edits.h says, and then by penalties: see penalized().
  //
  // temperature 0 and top_k 1 are greedy: the largest logit, the lowest id among equals. Otherwise the logits are
  // divided by the temperature and filtered in vLLM's order: min_p, then top_k, then top_p over what is left; the
  // token that crosses top_p is kept. Among equal logits the lower id is kept first. The draw is an exponential
  // race: argmax of p_i / e_i with e_i ~ Exp(1), which needs no sort and no running sum and so suits every device.
  //
  // A row without probabilities has no answer: -1 is returned when it contains NaN or +infinity, or only -infinity,
  // which may also mean that no token is allowed.
  int32_t sample(std::span<const float> logits, const SamplingParams& params, const RandomKey& key,
                 const SampleContext& context = {});

  // The chosen token first, then the `count` most likely ones in order. logits (V).
  std::vector<TokenLogprob> logprobs(std::span<const float> logits, int32_t chosen, int64_t count) const;

 private:
  struct Candidate {
    int32_t token;
    double weight;  // probability relative to the most likely token
  };
  std::span<const float> edit(std::span<const float> logits, const SamplingParams& params,
                              const SampleContext& context);
  void penalize(const SamplingParams& params, const SampleContext& context);
  void keep_top_k(int64_t k);
  void keep_top_p(double p);

  // Kept between calls to spare the allocation.
  std::vector<Candidate> candidates_;
  std::vector<float> edited_;
  std::vector<int32_t> counts_;  // 0 for each token between calls
};

// The logit of a token that the history has, `count` times in its output (0: in the prompt only). As in vLLM, in this
// order: a positive logit is divided by repetition_penalty, a negative one multiplied; frequency_penalty is subtracted
// `count` times; presence_penalty once if count is not 0. Each step is rounded to float32, and a finite logit stays
// finite: extreme penalties lead to the largest numbers there are.
float penalized(float logit, int64_t count, const SamplingParams& params);

// The largest logit, the lowest id among equals; -1 if any logit is NaN or the largest is not finite.
int32_t argmax(std::span<const float> logits);

}  // namespace tiny_vllm
