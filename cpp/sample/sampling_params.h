// How the next token of a request is chosen. Names, defaults and meaning are those of vLLM V1.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
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
  int64_t min_tokens = 0;                             // before that, nothing that ends the output is chosen
  std::vector<std::pair<int32_t, float>> logit_bias;  // token, what is added to its logit; [-100, 100]
  std::vector<int32_t> allowed_token_ids;             // empty: all
  std::vector<std::vector<int32_t>> bad_words;        // the last token of each is banned after the others
  std::optional<int64_t> logprobs;         // how many of the most likely tokens to report beside the chosen one
  std::optional<int64_t> prompt_logprobs;  // the same for each prompt token

  // Whether the choice of a token depends on which one the last was, and not only on how many there are.
  bool needs_last_token() const {
    return std::ranges::any_of(bad_words, [](const auto& word) { return word.size() > 1; });
  }
  bool bans_tokens() const {
    return min_tokens > 0 || !logit_bias.empty() || !allowed_token_ids.empty() || !bad_words.empty();
  }
  bool has_penalties() const { return repetition_penalty != 1 || frequency_penalty != 0 || presence_penalty != 0; }

  // Throws InvalidRequestError naming the field and its range.
  void validate(int64_t vocab_size) const;
};

}  // namespace tiny_vllm
