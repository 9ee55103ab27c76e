// Edits, penalties and log probabilities on the device against Sampler (cpp/sample) on the host: the same logits to the
// last bit, the same tokens and ranks. Run by full_test.sh --gpu.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <span>
#include <vector>

#include "check.h"
#include "device_array.h"
#include "kernels/kernels.h"
#include "sample/logit_edits.h"
#include "sample/sampler.h"
#include "sample_rows.h"

namespace tiny_vllm {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int32_t kPoison = 0x7f7f7f7f;  // what an Array holds at first

enum Kind { kNormal, kTies, kEqual, kPeaked, kMasked, kFewThreads, kLargeNumbers, kSignedZeros, kNumKinds };

// A row of logits, the same for the same generator.
std::vector<float> random_row(int kind, int64_t vocab_size, std::mt19937& random) {
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> row(static_cast<size_t>(vocab_size));
  for (float& x : row) x = normal(random);
  for (int64_t i = 0; i < vocab_size; ++i) {
    float& x = row[i];
    if (kind == kTies) x = std::round(x * 2) / 2;
    if (kind == kEqual) x = -7.25f;
    if (kind == kPeaked) x *= 20;
    if (kind == kMasked && random() % 8 != 0 && i != vocab_size / 2) x = -kInf;
    if (kind == kFewThreads && i % 1024 < 63) x += 100;  // more tokens before the 64th thread's than the list holds
    if (kind == kLargeNumbers) x = 1000 + x * 1e-3f;
    if (kind == kSignedZeros) x = x < 0 ? -0.0f : 0.0f;
  }
  return row;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// ---- log probabilities ----

// The chosen tokens: one that is not -infinity, the best one, and none.
int32_t choose(const std::vector<float>& row, int how, std::mt19937& random) {
  if (how == 2) return -1;
  const auto best = static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
  const auto any = static_cast<int32_t>(random() % row.size());
  return how == 0 && row[any] > -kInf ? any : best;
}

void check_logprobs(const std::vector<float>& row, const SampleRow& params, int32_t chosen,
                    const std::vector<DeviceLogprob>& got) {
  std::vector<TokenLogprob> expected;
  if (chosen >= 0 && params.num_logprobs >= 0) expected = Sampler().logprobs(row, chosen, params.num_logprobs);
  for (size_t i = 0; i < got.size(); ++i) {
    if (i >= expected.size()) {
      CHECK_EQ(got[i].token, kPoison);
      CHECK_EQ(got[i].rank, kPoison);
      continue;
    }
    CHECK_EQ(got[i].token, expected[i].token);
    CHECK_EQ(got[i].rank, expected[i].rank);
    const float at = expected[i].logprob;
    CHECK(got[i].logprob == at || std::abs(got[i].logprob - at) < 1e-5 * std::max(1.0f, std::abs(at)));
  }
}

TEST(logprobs_as_on_the_host) {
  std::mt19937 random(1);
  for (const int64_t vocab_size : {1, 2, 7, 64, 65, 1000, 1025, 5000, 32'003, 128'256}) {
    std::vector<std::vector<float>> rows;
    std::vector<SampleRow> params;
    std::vector<int32_t> tokens;
    for (int kind = 0; kind < kNumKinds; ++kind)
      for (const int32_t count : {-1, 0, 1, 2, 20, 63, 64}) {
        rows.push_back(random_row(kind, vocab_size, random));
        params.push_back({.num_logprobs = count});
        tokens.push_back(choose(rows.back(), static_cast<int>(rows.size() % 3), random));
      }
    for (const float wrong : {kNan, -kNan, kInf}) {  // rows without an answer
      rows.push_back(random_row(kNormal, vocab_size, random));
      rows.back()[random() % vocab_size] = wrong;
      params.push_back({.num_logprobs = 5});
      tokens.push_back(-1);
    }
    const int64_t n = std::ssize(rows);
    std::vector<float> flat;
    for (const auto& row : rows) flat.insert(flat.end(), row.begin(), row.end());
    const Array<float> logits(flat);
    const Array<SampleRow> device_rows(params);
    const Array<int32_t> device_tokens(tokens);
    const Array<DeviceLogprob> out(n * (kMaxLogprobs + 1));
    logprobs(stream(), {logits.data(), device_rows.data(), device_tokens.data(), n, vocab_size, out.data()});
    for (int64_t i = 0; i < n; ++i)
      check_logprobs(rows[i], params[i], tokens[i], out.get(i * (kMaxLogprobs + 1), kMaxLogprobs + 1));
    CHECK(same_bits(logits.get(0, n * vocab_size), flat));
  }
}

// A token that was not chosen by its logits, as those of a prompt.
TEST(logprobs_of_a_token_of_minus_infinity) {
  std::vector<float> row(2000, 1.0f);
  row[1999] = -kInf;
  const Array<float> logits(row);
  const Array<SampleRow> rows(std::vector<SampleRow>{{.num_logprobs = 1}});
  const Array<int32_t> tokens(std::vector<int32_t>{1999});
  const Array<DeviceLogprob> out(kMaxLogprobs + 1);
  logprobs(stream(), {logits.data(), rows.data(), tokens.data(), 1, 2000, out.data()});
  const auto got = out.get(0, 3);
  CHECK_EQ(got[0].token, 1999);
  CHECK_EQ(got[0].logprob, -kInf);
  CHECK_EQ(got[0].rank, 2000);
  CHECK_EQ(got[1].token, 0);
  CHECK(std::abs(got[1].logprob + std::log(1999.0f)) < 1e-5);
  CHECK_EQ(got[2].token, kPoison);
}

// ---- penalties ----

// A request's tokens, and how a row tells the device of them.
struct History {
  std::vector<int32_t> prompt, output;

  int32_t last() const { return !output.empty() ? output.back() : prompt.empty() ? -1 : prompt.back(); }
  // All but the last one, each once.
  std::vector<TokenCount> counts() const {
    std::vector<TokenCount> result;
    const auto add = [&](std::span<const int32_t> tokens, int32_t by) {
      for (int32_t token : tokens) {
        const auto at = std::find_if(result.begin(), result.end(), [&](const auto& c) { return c.token == token; });
        if (at != result.end()) {
          at->count += by;
        } else {
          result.push_back({token, by});
        }
      }
    };
    add(std::span(prompt).first(prompt.size() - (output.empty() && !prompt.empty())), 0);
    if (!output.empty()) add(std::span(output).first(output.size() - 1), 1);
    return result;
  }
};

// A batch of rows with penalties of all sorts, on the host and on the device.
struct Batch {
  int64_t vocab_size;
  std::vector<SampleRow> rows;
  std::vector<History> histories;
  std::vector<float> logits;     // (n, V)
  std::vector<float> penalized;  // (n, V) what they become

  Batch(int64_t of_size, uint32_t seed) : vocab_size(of_size) {
    std::mt19937 random(seed);
    const std::vector<SampleRow> settings{
        {},
        {.repetition_penalty = 1.3},
        {.repetition_penalty = 0.7},
        {.presence_penalty = 1.5},
        {.frequency_penalty = 0.3},
        {.presence_penalty = -2, .frequency_penalty = -0.1},
        {.repetition_penalty = 1.1, .presence_penalty = 0.77, .frequency_penalty = 0.123456789},
        {.repetition_penalty = 1e-300},
        {.repetition_penalty = 1e300, .presence_penalty = 2, .frequency_penalty = 2},
    };
    const auto tokens = [&](int64_t count) {
      std::vector<int32_t> result;
      // Few different ones, so that they occur several times.
      for (int64_t i = 0; i < count; ++i)
        result.push_back(static_cast<int32_t>(random() % std::min<int64_t>(vocab_size, 1 + 2 * count)));
      return result;
    };
    for (size_t i = 0; i < 6 * settings.size(); ++i) {
      SampleRow row = settings[i / 6];
      row.temperature = i % 2 ? 0 : 0.8;
      row.top_k = i % 3 ? 0 : 40;
      row.seed = i;
      row.num_logprobs = static_cast<int32_t>(i % 5) * 5 - 5;
      History history;
      const int64_t prompt_lengths[]{1, 300, 700, 0, 5, 1}, output_lengths[]{0, 0, 300, 0, 1, 40};
      history.prompt = tokens(prompt_lengths[i % 6]);
      history.output = tokens(output_lengths[i % 6]);
      if (i % 4 == 0 && !history.output.empty()) history.output.back() = static_cast<int32_t>(vocab_size - 1);
      row.last_is_output = !history.output.empty();
      row.position = std::ssize(history.prompt) + std::ssize(history.output);
      std::vector<float> x = random_row(static_cast<int>(i % kNumKinds), vocab_size, random);
      if (i % 13 == 5) x[random() % vocab_size] = kNan;
      if (i % 13 == 6) x[history.last() < 0 ? 0 : history.last()] = kNan;
      if (i % 13 == 7) x[history.last() < 0 ? 0 : history.last()] = -kInf;
      if (i % 13 == 8) x[random() % vocab_size] = std::numeric_limits<float>::max();
      logits.insert(logits.end(), x.begin(), x.end());
      for (const int32_t token : std::set(history.prompt.begin(), history.prompt.end()))
        if (!std::count(history.output.begin(), history.output.end(), token))
          x[token] = tiny_vllm::penalized(x[token], 0, params_of(row));
      for (const int32_t token : std::set(history.output.begin(), history.output.end()))
        x[token] = tiny_vllm::penalized(x[token], std::count(history.output.begin(), history.output.end(), token),
                                        params_of(row));
      penalized.insert(penalized.end(), x.begin(), x.end());
      rows.push_back(row);
      histories.push_back(history);
    }
  }

  int64_t size() const { return std::ssize(rows); }
  std::span<const float> logits_of(int64_t i) const { return std::span(logits).subspan(i * vocab_size, vocab_size); }
};

struct DeviceBatchOfRows {
  Array<float> logits;
  Array<SampleRow> rows;
  Array<TokenCount> counts;
  Array<int32_t> starts, last_tokens, tokens;
  Array<float> raw;
  Array<uint64_t> cuts;
  Array<unsigned char> partials;
  Array<unsigned> counters;
  Array<DeviceLogprob> reported;
  PenaltyArgs penalties;
  SamplingArgs sampling;
  LogprobsArgs logprob_args;

  struct Lists {
    // The first three are of nobody: as if this were the later part of a larger batch.
    std::vector<TokenCount> counts{{0, 5}, {0, 5}, {0, 5}};
    std::vector<int32_t> starts{3}, last_tokens;
    explicit Lists(const Batch& batch) {
      for (const History& history : batch.histories) {
        const std::vector<TokenCount> of_row = history.counts();
        counts.insert(counts.end(), of_row.begin(), of_row.end());
        starts.push_back(static_cast<int32_t>(counts.size()));
        last_tokens.push_back(history.last());
      }
    }
  };
  explicit DeviceBatchOfRows(const Batch& batch) : DeviceBatchOfRows(batch, Lists(batch)) {}
  DeviceBatchOfRows(const Batch& batch, const Lists& lists)
      : logits(batch.logits),
        rows(batch.rows),
        counts(lists.counts),
        starts(lists.starts),
        last_tokens(lists.last_tokens),
        tokens(batch.size()),
        raw(std::ssize(batch.logits)),
        cuts(batch.size()),
        partials(sampling_partial_bytes(stream(), batch.size())),
        counters(std::vector<unsigned>(batch.rows.size(), 0)),
        reported(batch.size() * (kMaxLogprobs + 1)) {
    const int64_t n = batch.size(), V = batch.vocab_size;
    penalties = {logits.data(), rows.data(), counts.data(), starts.data(), last_tokens.data(), n, V};
    sampling = {logits.data(), rows.data(), n, V, cuts.data(), partials.data(), counters.data(), tokens.data()};
    logprob_args = {raw.data(), rows.data(), tokens.data(), n, V, reported.data()};
  }

  void launch_all() const {
    keep_raw(stream(), penalties.logits, penalties.rows, raw.data(), penalties.n, penalties.vocab_size);
    penalize(stream(), penalties);
    sample_rows(stream(), sampling);
    logprobs(stream(), logprob_args);
  }
};

TEST(penalties_as_on_the_host) {
  for (const int64_t vocab_size : {1, 7, 1000, 128'256}) {
    const Batch batch(vocab_size, 2);
    const DeviceBatchOfRows device(batch);
    const int64_t numbers = std::ssize(batch.logits);
    penalize(stream(), device.penalties);
    CHECK(same_bits(device.logits.get(0, numbers), batch.penalized));
  }
}

// Sampling from the penalised logits and reporting the raw ones, launched one by one and as a graph.
TEST(tokens_and_logprobs_of_rows_with_penalties) {
  for (const int64_t vocab_size : {1, 7, 1000, 128'256}) {
    const Batch batch(vocab_size, 3);
    const DeviceBatchOfRows one_by_one(batch), recorded(batch);
    one_by_one.launch_all();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    TV_CUDA(cudaStreamBeginCapture(stream().handle, cudaStreamCaptureModeThreadLocal));
    recorded.launch_all();
    TV_CUDA(cudaStreamEndCapture(stream().handle, &graph));
    TV_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    TV_CUDA(cudaGraphLaunch(executable, stream().handle));
    for (const auto* device : {&one_by_one, &recorded}) {
      const auto tokens = device->tokens.get(0, batch.size());
      for (int64_t i = 0; i < batch.size(); ++i) {
        const auto row = batch.logits_of(i);
        const SampleRow& params = batch.rows[i];
        const History& history = batch.histories[i];
        CHECK_EQ(tokens[i], Sampler().sample(row, params_of(params), {params.seed, params.position},
                                             {history.prompt, history.output}));
        check_logprobs({row.begin(), row.end()}, params, tokens[i],
                       device->reported.get(i * (kMaxLogprobs + 1), kMaxLogprobs + 1));
      }
      CHECK(same_bits(device->logits.get(0, std::ssize(batch.logits)), batch.penalized));
    }
    TV_CUDA(cudaGraphExecDestroy(executable));
    TV_CUDA(cudaGraphDestroy(graph));
  }
}

// The token of a row whose last step had no answer: nothing is added for it.
TEST(a_last_token_that_is_none) {
  const std::vector<float> raw{1, 2, 3, 4};
  const Array<float> logits(raw);
  const Array<SampleRow> rows(std::vector<SampleRow>{{.presence_penalty = 1, .last_is_output = true}});
  const Array<TokenCount> counts(std::vector<TokenCount>{{2, 1}, {3, 0}});
  const Array<int32_t> starts(std::vector<int32_t>{0, 2}), last(std::vector<int32_t>{-1});
  const PenaltyArgs args{logits.data(), rows.data(), counts.data(), starts.data(), last.data(), 1, 4};
  penalize(stream(), args);
  CHECK(logits.get(0, 4) == std::vector<float>({1, 2, 2, 4}));
}

// ---- sets of allowed tokens, and biases ----

TEST(edits_as_on_the_host) {
  std::mt19937 random(4);
  for (const int64_t vocab_size : {5, 32, 1000, 128'256}) {
    std::vector<float> flat, expected;
    std::vector<SampleRow> rows;
    std::vector<TokenBias> biases{{0, 1}};  // of nobody, as if this were the later part of a batch
    std::vector<int32_t> starts{1};
    std::vector<uint32_t> allowed;
    Sampler sampler;
    for (int i = 0; i < 12; ++i) {
      std::vector<float> x = random_row(i % kNumKinds, vocab_size, random);
      flat.insert(flat.end(), x.begin(), x.end());
      SamplingParams params;
      if (i % 3) {
        for (int j = 0; j < 4; ++j) params.allowed_token_ids.push_back(static_cast<int32_t>(random() % vocab_size));
        params.allowed_token_ids.push_back(static_cast<int32_t>(vocab_size - 1));
        const auto bits = allowed_bits(params, vocab_size);
        rows.push_back({.allowed = static_cast<int32_t>(allowed.size() / bits.size())});
        allowed.insert(allowed.end(), bits.begin(), bits.end());
        for (int64_t t = 0; t < vocab_size; ++t)
          if (!std::count(params.allowed_token_ids.begin(), params.allowed_token_ids.end(), t)) x[t] = -kInf;
      } else {
        rows.push_back({});
      }
      for (int j = 0; i % 2 && j < 5; ++j) {
        biases.push_back({static_cast<int32_t>(vocab_size - 1 - j), j == 0 ? -kInf : static_cast<float>(j) / 4});
        x[biases.back().token] += biases.back().bias;
      }
      starts.push_back(static_cast<int32_t>(biases.size()));
      expected.insert(expected.end(), x.begin(), x.end());
    }
    const Array<float> logits(flat), raw(std::ssize(flat));
    for (SampleRow& row : rows) row.num_logprobs = static_cast<int32_t>(&row - rows.data()) % 2 - 1;
    const Array<SampleRow> device_rows(rows);
    const Array<TokenBias> device_biases(biases);
    const Array<int32_t> device_starts(starts);
    const Array<uint32_t> device_allowed(allowed);
    const int64_t n = std::ssize(rows);
    keep_raw(stream(), logits.data(), device_rows.data(), raw.data(), n, vocab_size);
    edit_logits(stream(), {logits.data(), device_rows.data(), device_biases.data(), device_starts.data(),
                           device_allowed.data(), n, vocab_size});
    CHECK(same_bits(logits.get(0, std::ssize(flat)), expected));
    const std::vector<float> kept = raw.get(0, std::ssize(flat)), poison = Array<float>(1).get(0, 1);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t t = 0; t < vocab_size; ++t) {
        const float wanted = rows[i].num_logprobs < 0 ? poison[0] : flat[i * vocab_size + t];
        CHECK(std::memcmp(&kept[i * vocab_size + t], &wanted, sizeof wanted) == 0);
      }
  }
}

}  // namespace
}  // namespace tiny_vllm
