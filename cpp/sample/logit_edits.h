// What a request does to single logits before its penalties: allowed_token_ids, bad_words, min_tokens and logit_bias,
// in vLLM's order. Every device gets them in the same form.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/step_batch.h"
#include "sample/sampling_params.h"

namespace tiny_vllm {

// Biases for the token after `output`, in the order in which they are to be added. end_tokens: what ends the output by
// itself, unless ignore_eos says otherwise.
std::vector<TokenBias> token_biases(const SamplingParams& params, std::span<const int32_t> output,
                                    std::span<const int32_t> end_tokens);

// allowed_token_ids as bits, (ceil(V / 32)).
std::vector<uint32_t> allowed_bits(const SamplingParams& params, int64_t vocab_size);

}  // namespace tiny_vllm
