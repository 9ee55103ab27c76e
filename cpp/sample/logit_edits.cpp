#include "sample/logit_edits.h"

#include <algorithm>
#include <limits>

namespace tiny_vllm {

std::vector<TokenBias> token_biases(const SamplingParams& params, std::span<const int32_t> output,
                                    std::span<const int32_t> end_tokens) {
  constexpr float kBanned = -std::numeric_limits<float>::infinity();
  std::vector<TokenBias> biases;
  for (const std::vector<int32_t>& word : params.bad_words) {
    const std::span<const int32_t> before(word.begin(), word.end() - 1);
    if (before.size() > output.size()) continue;
    if (std::ranges::equal(before, output.last(before.size()))) biases.push_back({word.back(), kBanned});
  }
  if (static_cast<int64_t>(output.size()) < params.min_tokens) {
    for (int32_t token : params.stop_token_ids) biases.push_back({token, kBanned});
    for (int32_t token : end_tokens)
      if (!params.ignore_eos) biases.push_back({token, kBanned});
  }
  for (const auto& [token, bias] : params.logit_bias) biases.push_back({token, bias});
  return biases;
}

std::vector<uint32_t> allowed_bits(const SamplingParams& params, int64_t vocab_size) {
  std::vector<uint32_t> bits((vocab_size + 31) / 32, 0);
  for (int32_t token : params.allowed_token_ids) bits[token / 32] |= uint32_t{1} << token % 32;
  return bits;
}

}  // namespace tiny_vllm
