// Philox, the sampler and the ranges of its parameters.
#include <cmath>
#include <limits>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "sample/logit_edits.h"
#include "sample/philox.h"
#include "sample/sampler.h"

namespace tiny_vllm {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

SamplingParams with(double temperature, int64_t top_k = 0, double top_p = 1, double min_p = 0) {
  SamplingParams params;
  params.temperature = temperature;
  params.top_k = top_k;
  params.top_p = top_p;
  params.min_p = min_p;
  return params;
}

// Which tokens come up in 2,000 draws.
std::vector<bool> drawn(const std::vector<float>& logits, const SamplingParams& params) {
  Sampler sampler;
  std::vector<bool> seen(logits.size());
  for (int64_t position = 0; position < 2000; ++position) {
    const int32_t token = sampler.sample(logits, params, {42, position});
    CHECK(token >= 0 && token < static_cast<int32_t>(logits.size()));
    if (token >= 0) seen[token] = true;
  }
  return seen;
}

}  // namespace

// The vectors for philox4x32-10 that come with the paper's library, Random123.
TEST(philox_known_answers) {
  CHECK(philox({0, 0, 0, 0}, 0) == PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, 0xffffffffffffffff) ==
        PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822) ==
        PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST(uniform_numbers_are_never_0_or_1) {
  CHECK(uniform_open(0) > 0);
  CHECK(uniform_open(0xffffffff) < 1);
  CHECK_EQ(uniform_open(0x7fffffff) + uniform_open(0x80000000), 1.0);
}

TEST(argmax_takes_the_lowest_id_and_refuses_what_is_not_finite) {
  CHECK_EQ(argmax(std::vector<float>{1, 3, 3, 2}), 1);
  CHECK_EQ(argmax(std::vector<float>{-kInf, -1, -kInf}), 1);
  CHECK_EQ(argmax(std::vector<float>{-kInf, -kInf}), -1);
  CHECK_EQ(argmax(std::vector<float>{1, kInf, 2}), -1);
  CHECK_EQ(argmax(std::vector<float>{kNan, 1}), -1);
  CHECK_EQ(argmax(std::vector<float>{1, kNan}), -1);
}

TEST(sample_refuses_rows_without_probabilities_by_every_road) {
  Sampler sampler;
  for (float wrong : {kNan, kInf})
    for (const SamplingParams& params : {with(0), with(1), with(1, 1), with(1, 2), with(1, 0, 0.5), with(1, 0, 1, 0.5)})
      CHECK_EQ(sampler.sample(std::vector<float>{1, 2, wrong, 3}, params, {1, 1}), -1);
}

TEST(logits_of_minus_infinity_are_never_drawn) {
  CHECK_EQ(Sampler().logprobs(std::vector<float>{0, -kInf}, 1, 0)[0].logprob, -kInf);
  CHECK(drawn({1, -kInf, 1, -kInf}, with(1)) == std::vector<bool>({true, false, true, false}));
  CHECK(drawn({1, -kInf, 1, -kInf}, with(1, 3)) == std::vector<bool>({true, false, true, false}));
}

TEST(any_temperature_is_safe) {
  for (double temperature : {5e-324, 1e-300, 1e-38, 1e-7, 1e-4})
    CHECK(drawn({-1e30f, 30, 29, 30, 3e38f, 3e38f}, with(temperature)) ==
          std::vector<bool>({false, false, false, false, true, true}));
  CHECK(drawn({-3e38f, 3e38f}, with(1e300)) == std::vector<bool>({true, true}));
}

TEST(filters_in_order) {
  const std::vector<float> logits{std::log(1.0f), std::log(8.0f), std::log(4.0f), std::log(2.0f)};  // 8 4 2 1 of 15
  CHECK(drawn(logits, with(1, 2)) == std::vector<bool>({false, true, true, false}));
  CHECK(drawn(logits, with(1, 0, 0.54)) == std::vector<bool>({false, true, true, false}));
  CHECK(drawn(logits, with(1, 0, 0.53)) == std::vector<bool>({false, true, false, false}));
  // top_k first: 8 of 12 is 0.667, so that 0.6 keeps one token; 8 of 15 would have kept two.
  CHECK(drawn(logits, with(1, 2, 0.6)) == std::vector<bool>({false, true, false, false}));
  CHECK(drawn(logits, with(1, 0, 1, 0.24)) == std::vector<bool>({false, true, true, true}));
  CHECK(drawn(logits, with(1, 0, 1, 0.26)) == std::vector<bool>({false, true, true, false}));
}

TEST(penalties_change_what_the_history_has) {
  SamplingParams params = with(0);
  CHECK(!params.has_penalties());
  params.repetition_penalty = 2;
  params.frequency_penalty = 0.5;
  params.presence_penalty = 0.25;
  CHECK(params.has_penalties());
  CHECK_EQ(penalized(4, 0, params), 2.0f);
  CHECK_EQ(penalized(-4, 0, params), -8.0f);
  CHECK_EQ(penalized(4, 3, params), 0.25f);  // 2 - 1.5 - 0.25
  CHECK_EQ(penalized(-4, 1, params), -8.75f);
  CHECK_EQ(penalized(0, 1, params), -0.75f);
  CHECK_EQ(penalized(-kInf, 1, params), -kInf);
  CHECK_EQ(penalized(kInf, 1, params), kInf);
  CHECK(std::isnan(penalized(kNan, 1, params)));

  // Tokens that come several times change once; the counts are gone before the next call.
  Sampler sampler;
  const std::vector<float> logits{4, 1.9f, 3.9f, -1};
  const std::vector<int32_t> prompt{0, 3, 0, 0}, output{2, 0, 2}, others{1, 1};
  for (int time = 0; time < 2; ++time) {
    CHECK_EQ(sampler.sample(logits, params, {0, 0}, {prompt, {}}), 2);      // 2 1.9 3.9
    CHECK_EQ(sampler.sample(logits, params, {0, 0}, {prompt, output}), 1);  // 1.25 1.9 0.7
    CHECK_EQ(sampler.sample(logits, params, {0, 0}, {others, others}), 0);  // 4 -0.3 3.9
    CHECK_EQ(sampler.sample(logits, with(0), {0, 0}, {prompt, output}), 0);
  }
  CHECK_EQ(sampler.logprobs(logits, 0, 0)[0].rank, 1);
}

TEST(edits_by_their_definitions) {
  Sampler sampler;
  const std::vector<float> logits{1, 5, 4, 3, 2};
  const std::vector<int32_t> output{2, 1, 2}, end{1};
  const auto choose = [&](const SamplingParams& params) {
    std::vector<uint32_t> allowed;
    if (!params.allowed_token_ids.empty()) allowed = allowed_bits(params, std::ssize(logits));
    return sampler.sample(logits, params, {0, 0}, {{}, output, end, allowed});
  };
  SamplingParams params = with(0);
  CHECK_EQ(choose(params), 1);
  params.min_tokens = 3;  // there are three
  CHECK_EQ(choose(params), 1);
  params.min_tokens = 4;
  CHECK_EQ(choose(params), 2);
  params.stop_token_ids = {2};
  CHECK_EQ(choose(params), 3);
  params.ignore_eos = true;
  CHECK_EQ(choose(params), 1);
  params = with(0);
  params.bad_words = {{1}, {2, 3, 2}, {1, 2, 2}};  // the output ends with 1, 2
  CHECK_EQ(choose(params), 3);
  params.bad_words = {{0, 2, 1, 2, 1}};  // longer than the output and the next token
  CHECK_EQ(choose(params), 1);
  params = with(0);
  params.logit_bias = {{4, 3.5f}, {1, -0.25f}};
  CHECK_EQ(choose(params), 4);
  params.allowed_token_ids = {0, 3};
  CHECK_EQ(choose(params), 3);
  params.repetition_penalty = 4;
  params.allowed_token_ids = {1, 4};
  CHECK_EQ(choose(params), 4);  // 4.75 / 4 against 5.5
  params.allowed_token_ids = {1};
  params.bad_words = {{1}};
  CHECK_EQ(choose(params), -1);
  CHECK((allowed_bits(params, 40) == std::vector<uint32_t>{2, 0}));
}

TEST(any_penalty_is_safe) {
  for (double repetition : {5e-324, 1e-300, 1e-38, 1e38, 1e300})
    for (float logit : {-3e38f, -1.0f, -0.0f, 0.0f, 1e-45f, 1.0f, 3e38f})
      for (double other : {-2.0, 0.0, 2.0}) {
        SamplingParams params;
        params.repetition_penalty = repetition;
        params.frequency_penalty = other;
        params.presence_penalty = other;
        CHECK(std::isfinite(penalized(logit, 1'000'000, params)));
      }
}

TEST(a_draw_depends_on_seed_and_position_only) {
  const std::vector<float> logits(1000, 0.0f);
  Sampler a, b;
  int equal_to_next = 0;
  for (int64_t position = 0; position < 100; ++position) {
    const int32_t token = a.sample(logits, with(1), {7, position});
    b.sample(std::vector<float>(10, 0.0f), with(1, 3), {9, position});  // something else in between
    CHECK_EQ(b.sample(logits, with(1), {7, position}), token);
    equal_to_next += token == a.sample(logits, with(1), {7, position + 1});
    equal_to_next += token == a.sample(logits, with(1), {8, position});
    equal_to_next += token == a.sample(logits, with(1), {7, position + (int64_t{1} << 32)});
  }
  CHECK(equal_to_next < 10);
}

TEST(logprobs_are_a_log_softmax) {
  const Sampler sampler;
  const std::vector<float> logits{1000, 1002, 1001, 1002};
  const std::vector<TokenLogprob> result = sampler.logprobs(logits, 0, 3);
  CHECK_EQ(result.size(), 4u);
  const double lse = 1000 + std::log(1 + 2 * std::exp(2.0) + std::exp(1.0));
  const std::vector<int32_t> tokens{0, 1, 3, 2};
  const std::vector<int64_t> ranks{4, 1, 2, 3};
  for (size_t i = 0; i < result.size(); ++i) {
    CHECK_EQ(result[i].token, tokens[i]);
    CHECK_EQ(result[i].rank, ranks[i]);
    CHECK(std::abs(result[i].logprob - (logits[tokens[i]] - lse)) < 1e-6);
  }
  CHECK_EQ(sampler.logprobs(logits, 2, 0).size(), 1u);
  CHECK_EQ(sampler.logprobs(logits, 2, 100).size(), 5u);
}

TEST(sampling_params_are_checked) {
  const int64_t V = 10;
  SamplingParams params;
  params.validate(V);
  params.stop_token_ids = {0, 9};
  params.logprobs = 10;
  params.prompt_logprobs = 0;
  params.validate(V);

  const auto refused = [&](const char* field, auto change) {
    SamplingParams bad;
    change(bad);
    CHECK_THROWS(InvalidRequestError, field, bad.validate(V));
  };
  refused("n must", [](auto& p) { p.n = 0; });
  refused("temperature", [](auto& p) { p.temperature = -1; });
  refused("temperature", [](auto& p) { p.temperature = kNan; });
  refused("temperature", [](auto& p) { p.temperature = kInf; });
  refused("top_k", [](auto& p) { p.top_k = -2; });
  refused("top_p", [](auto& p) { p.top_p = 0; });
  refused("top_p", [](auto& p) { p.top_p = kNan; });
  refused("min_p", [](auto& p) { p.min_p = 1.5; });
  refused("repetition_penalty", [](auto& p) { p.repetition_penalty = 0; });
  refused("repetition_penalty", [](auto& p) { p.repetition_penalty = kNan; });
  refused("repetition_penalty", [](auto& p) { p.repetition_penalty = kInf; });
  refused("frequency_penalty", [](auto& p) { p.frequency_penalty = 2.5; });
  refused("frequency_penalty", [](auto& p) { p.frequency_penalty = kNan; });
  refused("presence_penalty", [](auto& p) { p.presence_penalty = -2.5; });
  refused("presence_penalty", [](auto& p) { p.presence_penalty = kNan; });
  refused("max_tokens", [](auto& p) { p.max_tokens = 0; });
  refused("logprobs", [](auto& p) { p.logprobs = 11; });
  refused("prompt_logprobs", [](auto& p) { p.prompt_logprobs = -1; });
  refused("stop_token_ids", [](auto& p) { p.stop_token_ids = {10}; });
  refused("stop_token_ids", [](auto& p) { p.stop_token_ids = {3, -1}; });
  refused("min_tokens", [](auto& p) { p.min_tokens = -1; });
  refused("min_tokens", [](auto& p) { p.min_tokens = 17; });  // max_tokens is 16
  refused("logit_bias", [](auto& p) { p.logit_bias = {{10, 0.0f}}; });
  refused("logit_bias", [](auto& p) { p.logit_bias = {{1, 101.0f}}; });
  refused("logit_bias", [](auto& p) { p.logit_bias = {{1, static_cast<float>(kNan)}}; });
  refused("allowed_token_ids", [](auto& p) { p.allowed_token_ids = {-1}; });
  refused("bad_words", [](auto& p) { p.bad_words = {{1, 10}}; });
  refused("bad_words", [](auto& p) { p.bad_words = {{}}; });
}

}  // namespace tiny_vllm
