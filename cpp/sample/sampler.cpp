#include "sample/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "sample/logit_edits.h"
#include "sample/philox.h"

namespace tiny_vllm {
namespace {

void require(bool ok, const char* field, const char* range, double got) {
  if (!ok) throw InvalidRequestError(str(field, " must be ", range, ", got ", got));
}

// The logarithm of the sum of exp(logits), without overflow.
double log_sum_exp(std::span<const float> logits, float max) {
  double sum = 0;
  for (float x : logits) sum += std::exp(static_cast<double>(x) - max);
  return max + std::log(sum);
}

}  // namespace

void SamplingParams::validate(int64_t vocab_size) const {
  require(n >= 1, "n", "at least 1", static_cast<double>(n));
  require(std::isfinite(temperature) && temperature >= 0, "temperature", "a finite number >= 0", temperature);
  require(top_k >= -1, "top_k", "-1 or 0 (all), or at least 1", static_cast<double>(top_k));
  require(top_p > 0 && top_p <= 1, "top_p", "in (0, 1]", top_p);
  require(min_p >= 0 && min_p <= 1, "min_p", "in [0, 1]", min_p);
  require(std::isfinite(repetition_penalty) && repetition_penalty > 0, "repetition_penalty", "a finite number > 0",
          repetition_penalty);
  require(frequency_penalty >= -2 && frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]", frequency_penalty);
  require(presence_penalty >= -2 && presence_penalty <= 2, "presence_penalty", "in [-2, 2]", presence_penalty);
  if (max_tokens) require(*max_tokens >= 1, "max_tokens", "at least 1", static_cast<double>(*max_tokens));
  for (const auto& [field, count] : {std::pair{"logprobs", logprobs}, std::pair{"prompt_logprobs", prompt_logprobs}})
    if (count && (*count < 0 || *count > vocab_size))
      throw InvalidRequestError(str(field, " must be in [0, ", vocab_size, "] (the vocabulary), got ", *count));
  const auto require_token = [vocab_size](const char* field, int32_t id) {
    if (id < 0 || id >= vocab_size)
      throw InvalidRequestError(str(field, " must be in [0, ", vocab_size - 1, "], got ", id));
  };
  for (int32_t id : stop_token_ids) require_token("stop_token_ids", id);
  for (int32_t id : allowed_token_ids) require_token("allowed_token_ids", id);
  require(min_tokens >= 0 && min_tokens <= max_tokens.value_or(min_tokens), "min_tokens",
          "at least 0 and at most max_tokens", static_cast<double>(min_tokens));
  for (const auto& [id, bias] : logit_bias) {
    require_token("logit_bias", id);
    require(bias >= -100 && bias <= 100, "logit_bias", "between -100 and 100", bias);
  }
  for (const std::vector<int32_t>& word : bad_words) {
    if (word.empty()) throw InvalidRequestError("bad_words must not have a word without tokens");
    for (int32_t id : word) require_token("bad_words", id);
  }
}

int32_t argmax(std::span<const float> logits) {
  int32_t best = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) return -1;
    if (logits[i] > logits[best]) best = static_cast<int32_t>(i);
  }
  return std::isfinite(logits[best]) ? best : -1;
}

float penalized(float logit, int64_t count, const SamplingParams& params) {
  if (!std::isfinite(logit)) return logit;
  constexpr float kMax = std::numeric_limits<float>::max(), kMin = std::numeric_limits<float>::min();
  const float repetition = static_cast<float>(std::clamp<double>(params.repetition_penalty, kMin, kMax));
  float x = logit > 0 ? logit / repetition : logit * repetition;
  x -= static_cast<float>(params.frequency_penalty) * static_cast<float>(count);
  if (count > 0) x -= static_cast<float>(params.presence_penalty);
  return std::clamp(x, -kMax, kMax);
}

std::span<const float> Sampler::edit(std::span<const float> logits, const SamplingParams& params,
                                     const SampleContext& context) {
  const std::vector<TokenBias> biases = token_biases(params, context.output, context.end_tokens);
  if (biases.empty() && context.allowed.empty() && !params.has_penalties()) return logits;
  edited_.assign(logits.begin(), logits.end());
  if (!context.allowed.empty())
    for (size_t token = 0; token < edited_.size(); ++token)
      if (!(context.allowed[token / 32] >> token % 32 & 1)) edited_[token] = -std::numeric_limits<float>::infinity();
  for (const TokenBias& b : biases) edited_[b.token] += b.bias;
  if (params.has_penalties()) penalize(params, context);
  return edited_;
}

void Sampler::penalize(const SamplingParams& params, const SampleContext& context) {
  counts_.resize(edited_.size());
  for (int32_t token : context.output) ++counts_[token];
  for (std::span<const int32_t> tokens : {context.prompt, context.output})
    for (int32_t token : tokens)
      if (int32_t& count = counts_[token]; count >= 0) {
        edited_[token] = penalized(edited_[token], count, params);
        count = -1;  // once is enough
      }
  for (std::span<const int32_t> tokens : {context.prompt, context.output})
    for (int32_t token : tokens) counts_[token] = 0;
}

int32_t Sampler::sample(std::span<const float> logits, const SamplingParams& params, const RandomKey& key,
                        const SampleContext& context) {
  logits = edit(logits, params, context);
  const int32_t top = argmax(logits);
  if (top < 0 || params.temperature == 0 || params.top_k == 1) return top;

  // Subtracting the maximum before dividing keeps every temperature safe: the largest exponent is 0.
  const double max = logits[top];
  candidates_.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    const double weight = logits[i] == max ? 1.0 : std::exp((logits[i] - max) / params.temperature);
    if (weight > 0 && weight >= params.min_p) candidates_.push_back({static_cast<int32_t>(i), weight});
  }
  if (params.top_k > 0) keep_top_k(params.top_k);
  if (params.top_p < 1) keep_top_p(params.top_p);

  // The race. Token i always uses word i % 4 of block i / 4, whether or not its neighbours were filtered out.
  const auto position = static_cast<uint64_t>(key.position);
  int32_t winner = top;
  double best = -1;
  int64_t block_index = -1;
  PhiloxBlock block{};
  // Candidates may be out of order after a filter; a block is computed again only when the next one is elsewhere.
  for (const Candidate& c : candidates_) {
    if (c.token / 4 != block_index) {
      block_index = c.token / 4;
      block = philox({static_cast<uint32_t>(block_index), static_cast<uint32_t>(position),
                      static_cast<uint32_t>(position >> 32), 0},
                     key.seed);
    }
    const double e = -std::log(uniform_open(block[c.token % 4]));
    const double score = c.weight / e;
    if (score > best || (score == best && c.token < winner)) {
      best = score;
      winner = c.token;
    }
  }
  return winner;
}

void Sampler::keep_top_k(int64_t k) {
  if (k >= static_cast<int64_t>(candidates_.size())) return;
  std::nth_element(candidates_.begin(), candidates_.begin() + (k - 1), candidates_.end(),
                   [](const Candidate& a, const Candidate& b) {
                     return a.weight > b.weight || (a.weight == b.weight && a.token < b.token);
                   });
  candidates_.resize(k);
}

void Sampler::keep_top_p(double p) {
  double total = 0;
  for (const Candidate& c : candidates_) total += c.weight;

  // Sorting the whole vocabulary would cost more than the rest of the sampler. A few hundred tokens nearly always
  // hold the mass: sort that many, and more only while the sum has not been reached.
  const auto more_likely = [](const Candidate& a, const Candidate& b) {
    return a.weight > b.weight || (a.weight == b.weight && a.token < b.token);
  };
  const double wanted = p * total;
  double sum = 0;
  size_t sorted = 0;
  while (sorted < candidates_.size()) {
    const size_t next = std::min(candidates_.size(), std::max<size_t>(256, sorted * 8));
    std::partial_sort(candidates_.begin() + sorted, candidates_.begin() + next, candidates_.end(), more_likely);
    for (; sorted < next; ++sorted) {
      sum += candidates_[sorted].weight;
      if (sum >= wanted) {
        candidates_.resize(sorted + 1);
        return;
      }
    }
  }
}

std::vector<TokenLogprob> Sampler::logprobs(std::span<const float> logits, int32_t chosen, int64_t count) const {
  const float max = *std::max_element(logits.begin(), logits.end());
  const double lse = log_sum_exp(logits, max);
  const auto logprob = [&](int32_t token) { return static_cast<float>(logits[token] - lse); };

  std::vector<TokenLogprob> result;
  const int64_t rank = 1 + std::count_if(logits.begin(), logits.end(), [&](float x) { return x > logits[chosen]; });
  result.push_back({chosen, logprob(chosen), rank});
  if (count == 0) return result;

  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  count = std::min<int64_t>(count, static_cast<int64_t>(order.size()));
  std::partial_sort(order.begin(), order.begin() + count, order.end(),
                    [&](int32_t a, int32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); });
  for (int64_t i = 0; i < count; ++i) result.push_back({order[i], logprob(order[i]), i + 1});
  return result;
}

}  // namespace tiny_vllm
