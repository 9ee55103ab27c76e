// How the next token of a request is chosen. Names, defaults and meaning are those of vLLM V1.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace tiny_vllm {

struct SamplingParams {
  int64_t n = 1;                           // outputs for one prompt
  double temperature = 1.0;                // 0: greedy
  int64_t top_k = 0;                       // 0 or -1: all
  double top_p = 1.0;                      // in (0, 1]
  double min_p = 0.0;                      // in [0, 1]
  double repetition_penalty = 1.0;         // divides logits of tokens in the prompt or output; > 0
  double frequency_penalty = 0.0;          // subtracted for each time a token is in the output; in [-2, 2]
  double presence_penalty = 0.0;           // subtracted once for a token in the output; in [-2, 2]
  std::optional<int64_t> seed;             // absent: drawn from the engine's seed
  std::optional<int64_t> max_tokens = 16;  // absent: up to max_model_len
  bool ignore_eos = false;
  std::vector<int32_t> stop_token_ids;
  std::optional<int64_t> logprobs;         // how many of the most likely tokens to report beside the chosen one
  std::optional<int64_t> prompt_logprobs;  // the same for each prompt token

  bool has_penalties() const { return repetition_penalty != 1 || frequency_penalty != 0 || presence_penalty != 0; }

  // Throws InvalidRequestError naming the field and its range.
  void validate(int64_t vocab_size) const;
};

}  // namespace tiny_vllm
