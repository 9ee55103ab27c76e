// The engine beside devices that fail, and devices that choose tokens themselves and are late to tell.
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "engine/engine.h"
#include "sample_rows.h"

namespace tiny_vllm {
namespace {

// The CPU backend, to be changed by tests.
class Wrapped : public Backend {
 public:
  std::string description() const override { return inner_->description(); }
  MemoryInfo memory() const override { return inner_->memory(); }
  Buffer allocate(int64_t bytes) override { return inner_->allocate(bytes); }
  void upload(void* device, const void* host, int64_t bytes) override { inner_->upload(device, host, bytes); }
  void download(void* host, const void* device, int64_t bytes) override { inner_->download(host, device, bytes); }
  void synchronize() override { inner_->synchronize(); }
  DeviceBatch upload(const StepBatch& batch) override { return inner_->upload(batch); }
  void embedding(const Tensor& table, const int32_t* ids, const Tensor& out) override {
    inner_->embedding(table, ids, out);
  }
  void rms_norm(const Tensor& x, const Tensor& weight, float eps, const Tensor& out) override {
    inner_->rms_norm(x, weight, eps, out);
  }
  void matmul(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out) override {
    inner_->matmul(x, weight, bias, out);
  }
  void matmul_add(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out) override {
    inner_->matmul_add(x, weight, bias, out);
  }
  void rope_and_cache(const Tensor& qkv, const Tensor& q_norm, const Tensor& k_norm, float eps,
                      const DeviceBatch& batch, const AttentionShape& shape, const PagedKv& kv) override {
    inner_->rope_and_cache(qkv, q_norm, k_norm, eps, batch, shape, kv);
  }
  void paged_attention(const Tensor& qkv, const DeviceBatch& batch, const AttentionShape& shape, const PagedKv& kv,
                       const Tensor& out) override {
    inner_->paged_attention(qkv, batch, shape, kv, out);
  }
  void act_mul(const Tensor& gate_up, Activation activation, const Tensor& out) override {
    inner_->act_mul(gate_up, activation, out);
  }
  void gather_rows(const Tensor& x, const int32_t* rows, const Tensor& out) override {
    inner_->gather_rows(x, rows, out);
  }
  void copy_block(const PagedKv& kv, int32_t src, int32_t dst) override { inner_->copy_block(kv, src, dst); }

 private:
  std::unique_ptr<Backend> inner_ = make_backend({.device = "cpu", .num_threads = 1});
};

// Fails in the one op that `fails_in` names.
class FailingBackend final : public Wrapped {
 public:
  explicit FailingBackend(const std::string& fails_in) : fails_in_(fails_in) {}

  void paged_attention(const Tensor& qkv, const DeviceBatch& batch, const AttentionShape& shape, const PagedKv& kv,
                       const Tensor& out) override {
    if (fails_in_ == "attention") throw DeviceError("the device fell off the bus");
    Wrapped::paged_attention(qkv, batch, shape, kv, out);
  }
  void gather_rows(const Tensor& x, const int32_t* rows, const Tensor& out) override {
    if (fails_in_ == "logits") throw std::bad_alloc();
    Wrapped::gather_rows(x, rows, out);
  }
  void copy_block(const PagedKv& kv, int32_t src, int32_t dst) override {
    if (fails_in_ == "copy") throw DeviceError("the device fell off the bus");
    Wrapped::copy_block(kv, src, dst);
  }

 private:
  const std::string& fails_in_;
};

// Chooses tokens itself, as a GPU does: the host learns them by receive() only, and until then names them by the row
// that they were sampled for.
class SamplingBackend final : public Wrapped {
 public:
  struct Log {
    int64_t steps = 0;
    int64_t ahead = 0;  // steps that began before the tokens of the step before were received
    std::string fails_in;
  };
  explicit SamplingBackend(Log& log) : log_(log) {}

  bool can_sample() const override { return true; }
  int32_t max_logprobs() const override { return 3; }

  void embedding(const Tensor& table, const int32_t* ids, const Tensor& out) override {
    std::vector<int32_t> known(ids, ids + out.shape[0]);
    for (int32_t& id : known)
      if (id < 0) id = tokens_.at(~id);
    known_ = known;
    Wrapped::embedding(table, known.data(), out);
  }

  DeviceBatch upload(const StepBatch& batch) override {
    ++log_.steps;
    log_.ahead += sent_ != received_;
    return Wrapped::upload(batch);
  }

  void sample(const Tensor& logits, const DeviceBatch& batch, int64_t begin) override {
    if (log_.fails_in == "sample") throw DeviceError("the device fell off the bus");
    const int64_t V = logits.shape[1];
    tokens_.resize(begin + logits.shape[0]);
    logprobs_.resize(tokens_.size() * 4);
    for (int64_t i = begin; i < std::ssize(tokens_); ++i) {
      const SampleRow& row = batch.host->sampling[i];
      const std::span<const float> values(logits.as<float>() + (i - begin) * V, V);
      SamplingParams params = params_of(row);
      const StepBatch& step = *batch.host;
      for (int32_t b = 0; !step.token_biases_start.empty() && b < std::ssize(step.token_biases); ++b)
        if (b >= step.token_biases_start.at(i) && b < step.token_biases_start.at(i + 1))
          params.logit_bias.emplace_back(step.token_biases[b].token, step.token_biases[b].bias);
      std::span<const uint32_t> allowed;
      if (row.allowed >= 0) allowed = std::span(step.allowed).subspan(row.allowed * ((V + 31) / 32), (V + 31) / 32);
      std::vector<int32_t> prompt, output;
      if (row.has_penalties()) {
        const auto& starts = batch.host->token_counts_start;
        for (int32_t c = starts.at(i); c < starts.at(i + 1); ++c) {
          const TokenCount& count = batch.host->token_counts[c];
          prompt.push_back(count.token);
          output.insert(output.end(), count.count, count.token);
        }
        (row.last_is_output ? output : prompt).push_back(known_.at(batch.host->logits_rows[i]));
      }
      tokens_[i] = sampler_.sample(values, params, {row.seed, row.position}, {prompt, output, {}, allowed});
      if (row.num_logprobs < 0) continue;
      const std::vector<TokenLogprob> all = sampler_.logprobs(values, tokens_[i], row.num_logprobs);
      for (size_t j = 0; j < all.size(); ++j)
        logprobs_[i * 4 + j] = {all[j].token, all[j].logprob, static_cast<int32_t>(all[j].rank)};
    }
  }

  int64_t send(int64_t n) override {
    sent_tokens_[sent_ % 2].assign(tokens_.begin(), tokens_.begin() + n);
    sent_logprobs_[sent_ % 2].assign(logprobs_.begin(), logprobs_.begin() + n * 4);
    return sent_++;
  }
  Sampled receive(int64_t ticket) override {
    if (log_.fails_in == "receive") throw DeviceError("the device fell off the bus");
    CHECK(ticket >= sent_ - 2);
    received_ = ticket + 1;
    return {sent_tokens_[ticket % 2], sent_logprobs_[ticket % 2]};
  }

 private:
  Log& log_;
  Sampler sampler_;
  std::vector<int32_t> tokens_, known_;
  std::vector<DeviceLogprob> logprobs_;
  std::vector<int32_t> sent_tokens_[2];
  std::vector<DeviceLogprob> sent_logprobs_[2];
  int64_t sent_ = 0, received_ = 0;
};

constexpr const char* kConfig = R"({
  "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "rms_norm_eps": 1e-5,
  "max_position_embeddings": 128, "hidden_act": "silu", "tie_word_embeddings": true, "rope_theta": 10000.0
})";

// Two sequences at a time, blocks of 4 tokens, 8 of them.
std::unique_ptr<Engine> make_engine(std::unique_ptr<Backend> backend, const std::string& scheduler = "continuous",
                                    bool enforce_eager = false, bool record_events = false) {
  EngineOptions options;
  options.dtype = DType::kFloat32;
  options.dummy_weights = true;
  options.block_size = 4;
  options.max_num_seqs = 2;
  options.max_num_batched_tokens = 16;
  options.kv_cache_memory_bytes = 8 * 2 * 2 * 2 * 4 * 8 * 4;  // NB, L, keys and values, Hk, BS, Dh, bytes
  options.scheduler = scheduler;
  options.scheduling_policy = "fcfs";
  options.record_events = record_events;
  options.backend.enforce_eager = enforce_eager;
  return std::make_unique<Engine>(kConfig, "config.json", "", options, std::move(backend), nullptr);
}
std::unique_ptr<Engine> make_engine(const std::string& fails_in) {
  return make_engine(std::make_unique<FailingBackend>(fails_in));
}

SamplingParams greedy(int64_t max_tokens, int64_t n = 1) {
  SamplingParams params;
  params.temperature = n == 1 ? 0 : 1;
  params.max_tokens = max_tokens;
  params.n = n;
  params.ignore_eos = true;
  return params;
}

std::vector<int32_t> run_to_the_end(Engine& engine, const std::string& id) {
  std::vector<int32_t> tokens;
  while (engine.has_unfinished_requests()) {
    for (const StepOutput& out : engine.step()) {
      CHECK(out.finish_reason != FinishReason::kError);
      if (out.request_id == id) tokens.push_back(out.token);
    }
    engine.scheduler().check_invariants();
  }
  return tokens;
}

void check_all_free(const Engine& engine) {
  engine.scheduler().check_invariants();
  CHECK_EQ(engine.allocator().free_blocks(), engine.allocator().num_blocks());
}

TEST(a_failing_forward_pass_ends_its_requests_and_no_others) {
  std::string fails_in;
  const auto engine = make_engine(fails_in);
  engine->add_request("alone", {1, 2, 3, 4, 5, 6, 7, 8, 9}, greedy(6));
  const std::vector<int32_t> expected = run_to_the_end(*engine, "alone");
  CHECK_EQ(expected.size(), size_t{6});

  for (const std::string op : {"attention", "logits"}) {
    engine->add_request("a", {20, 21, 22, 23, 24}, greedy(8));
    engine->step();
    engine->add_request("b", {1, 2, 3}, greedy(8));
    engine->add_request("waiting", {1, 2, 3, 4, 5, 6, 7, 8, 9}, greedy(6));  // two run at a time
    fails_in = op;
    const std::vector<StepOutput> outputs = engine->step();
    fails_in = "";
    CHECK_EQ(outputs.size(), size_t{2});
    for (const StepOutput& out : outputs) {
      CHECK(out.request_id == "a" || out.request_id == "b");
      CHECK(out.finish_reason == FinishReason::kError);
      CHECK_EQ(out.token, -1);
      CHECK(out.error.find("the forward pass failed: ") == 0);
    }
    CHECK(!engine->abort_request("a"));
    CHECK(!engine->abort_request("b"));
    CHECK(run_to_the_end(*engine, "waiting") == expected);
    check_all_free(*engine);
  }
}

// What was not computed must not be found in the prefix cache: the same prompt again gives the same tokens.
TEST(a_failing_forward_pass_leaves_nothing_in_the_prefix_cache) {
  std::string fails_in = "attention";
  const auto engine = make_engine(fails_in);
  engine->add_request("a", {1, 2, 3, 4, 5, 6, 7, 8, 9}, greedy(6));
  CHECK_EQ(engine->step().size(), size_t{1});
  CHECK_EQ(engine->allocator().cached_blocks(), int64_t{0});
  check_all_free(*engine);
}

TEST(a_failing_forward_pass_ends_all_n_sequences) {
  std::string fails_in;
  const auto engine = make_engine(fails_in);
  // In the prompt, when there is one sequence yet; in the copy of the block that both want to write; and in a decode.
  for (const auto& [op, steps] : {std::pair("attention", 0), std::pair("copy", 1), std::pair("attention", 2)}) {
    engine->add_request("a", {1, 2, 3, 4, 5}, greedy(8, 2));
    for (int i = 0; i < steps; ++i) CHECK_EQ(engine->step().size(), size_t{2});
    fails_in = op;
    const std::vector<StepOutput> outputs = engine->step();
    fails_in = "";
    CHECK_EQ(outputs.size(), size_t{2});
    for (size_t i = 0; i < outputs.size(); ++i) {
      CHECK_EQ(outputs[i].index, static_cast<int64_t>(i));
      CHECK(outputs[i].finish_reason == FinishReason::kError);
    }
    CHECK(!engine->has_unfinished_requests());
    check_all_free(*engine);
  }
}

// ---- devices that choose the tokens themselves ----

struct Answer {
  std::vector<int32_t> tokens;
  std::vector<TokenLogprob> logprobs;  // of all tokens, one after another
  FinishReason reason = FinishReason::kNone;
};
using Answers = std::map<std::pair<std::string, int64_t>, Answer>;

void collect(const std::vector<StepOutput>& outputs, Answers& answers) {
  for (const StepOutput& out : outputs) {
    Answer& answer = answers[{out.request_id, out.index}];
    CHECK(answer.reason == FinishReason::kNone);
    if (out.token >= 0) answer.tokens.push_back(out.token);
    answer.logprobs.insert(answer.logprobs.end(), out.logprobs.begin(), out.logprobs.end());
    answer.reason = out.finish_reason;
  }
}

// Requests of all kinds, more than there is room for, some of which come while others run.
void add_mixed(Engine& engine, int round) {
  const auto prompt = [&](int length) {
    std::vector<int32_t> ids;
    for (int i = 0; i < length; ++i) ids.push_back((7 * i + 3 * round) % 64);
    return ids;
  };
  const std::string r = std::to_string(round);
  SamplingParams params = greedy(16);
  engine.add_request("greedy" + r, prompt(5), params);
  params.repetition_penalty = 1.3;
  params.presence_penalty = 0.5;
  params.logprobs = 2;
  engine.add_request("penalties" + r, prompt(11), params);
  params = SamplingParams();
  params.temperature = 3;
  params.seed = 11;
  params.max_tokens = 12;
  params.ignore_eos = true;
  for (int32_t id = 0; id < 64; id += 5) params.stop_token_ids.push_back(id);  // one in five: most stop early
  engine.add_request("stops" + r, prompt(3), params);
  params.stop_token_ids.clear();
  params.n = 2;
  params.max_tokens = 5;
  engine.add_request("n" + r, prompt(4), params);
  params.n = 1;
  params.logprobs = 9;  // more than SamplingBackend reports
  engine.add_request("logprobs" + r, prompt(6), params);
  params.logprobs.reset();
  params.max_tokens = 8;
  params.min_tokens = 6;
  params.ignore_eos = false;
  for (int32_t id = 1; id < 64; id += 2) params.stop_token_ids.push_back(id);
  params.logit_bias = {{7, 2.0f}, {8, -50.0f}};
  engine.add_request("min" + r, prompt(5), params);
  params = greedy(10);
  params.allowed_token_ids = {3, 4, 9, 33, 63};
  params.bad_words = {{3, 3}, {9}, {4, 63, 4}};
  params.repetition_penalty = 1.1;
  params.logprobs = 1;
  engine.add_request("words" + r, prompt(7), params);
  params = SamplingParams();
  params.prompt_logprobs = 1;
  params.max_tokens = 1;
  engine.add_request("prompt" + r, prompt(6), params);
}

Answers run_mixed(Engine& engine) {
  Answers answers;
  add_mixed(engine, 0);
  for (int step = 0; engine.has_unfinished_requests(); ++step) {
    if (step == 3 || step == 17) add_mixed(engine, step);
    if (step == 8) CHECK(engine.abort_request("penalties3"));
    collect(engine.step(), answers);
    engine.scheduler().check_invariants();
  }
  CHECK_EQ(engine.allocator().free_blocks(), engine.allocator().num_blocks());
  std::erase_if(answers, [](const auto& entry) { return entry.first.first == "penalties3"; });
  return answers;
}

TEST(steps_that_start_early_change_no_answer) {
  for (const std::string scheduler : {"continuous", "static"}) {
    SamplingBackend::Log ahead, waiting;
    const auto host = make_engine(std::make_unique<Wrapped>(), scheduler);
    const auto device = make_engine(std::make_unique<SamplingBackend>(ahead), scheduler);
    const auto eager = make_engine(std::make_unique<SamplingBackend>(waiting), scheduler, true);
    const Answers expected = run_mixed(*host);
    CHECK_EQ(expected.size(), size_t{26});  // 3 times 9 sequences, less one
    for (const auto& engine : {&device, &eager}) {
      const Answers answers = run_mixed(**engine);
      CHECK_EQ(answers.size(), expected.size());
      for (const auto& [key, answer] : expected) {
        CHECK(answers.at(key).tokens == answer.tokens);
        CHECK(answers.at(key).reason == answer.reason);
        CHECK_EQ(answers.at(key).logprobs.size(), answer.logprobs.size());
        for (size_t i = 0; i < answer.logprobs.size(); ++i) {
          CHECK_EQ(answers.at(key).logprobs[i].token, answer.logprobs[i].token);
          CHECK_EQ(answers.at(key).logprobs[i].rank, answer.logprobs[i].rank);
        }
      }
    }
    CHECK(ahead.ahead > 0);
    CHECK_EQ(waiting.ahead, int64_t{0});
    if (scheduler == "continuous") CHECK(device->metrics().num_preemptions > 0);
  }
}

// The engine returns a token with each step, though the next step is under way by then.
TEST(every_step_brings_a_token) {
  SamplingBackend::Log log;
  const auto engine = make_engine(std::make_unique<SamplingBackend>(log));
  for (int round = 0; round < 3; ++round) {
    engine->add_request("a", {1, 2, 3}, greedy(4));
    for (int i = 0; i < 4; ++i) CHECK_EQ(engine->step().size(), size_t{1});
    CHECK(!engine->has_unfinished_requests());
  }
  CHECK_EQ(log.steps, int64_t{12});  // no step beyond max_tokens
  check_all_free(*engine);
}

// A guided request sits out the steps that start early, and gets the tokens that it gets anywhere. The others do not
// wait for it.
TEST(a_guided_request_beside_steps_that_start_early) {
  // Token i may be any with the remainder i % 3 + 1 by 5.
  const auto allowed = [](int64_t i) {
    std::vector<uint32_t> bits(2, 0);
    for (int32_t id = 0; id < 64; ++id)
      if (id % 5 == i % 3 + 1) bits[id / 32] |= uint32_t{1} << id % 32;
    return bits;
  };
  SamplingBackend::Log early, late;
  const auto host = make_engine(std::make_unique<Wrapped>());
  const auto device = make_engine(std::make_unique<SamplingBackend>(early));
  const auto eager = make_engine(std::make_unique<SamplingBackend>(late), "continuous", true);
  Answers expected;
  for (const auto& engine : {&host, &device, &eager}) {
    Answers answers;
    SamplingParams params = greedy(7, 2);
    params.temperature = 2;
    params.seed = 3;
    (*engine)->add_request("guided", {1, 2, 3}, params, 0, allowed(0));
    params.n = 1;
    params.allowed_token_ids = {1, 2, 3, 63};
    (*engine)->add_request("both", {4}, params, 0, allowed(0));
    (*engine)->add_request("free", {1, 2, 3, 4}, greedy(30));
    while ((*engine)->has_unfinished_requests()) {
      const std::vector<StepOutput> outputs = (*engine)->step();
      collect(outputs, answers);
      for (const StepOutput& out : outputs) {
        const auto count = std::ssize(answers.at({out.request_id, out.index}).tokens);
        if (out.request_id != "free" && out.finish_reason == FinishReason::kNone)
          CHECK((*engine)->allow_tokens(out.request_id, out.index, count, allowed(count)));
      }
    }
    CHECK_EQ(answers.size(), size_t{4});
    for (const auto& [key, answer] : answers)
      for (int64_t i = 0; i < std::ssize(answer.tokens); ++i) {
        if (key.first != "free") CHECK_EQ(answer.tokens[i] % 5, i % 3 + 1);
        if (key.first == "both") CHECK_EQ(answer.tokens[i], i % 3 + 1 < 3 ? i % 3 + 1 : answer.tokens[i]);
      }
    if (engine == &host) expected = answers;
    for (const auto& [key, answer] : expected) CHECK(answers.at(key).tokens == answer.tokens);
    check_all_free(**engine);
  }
  CHECK(early.ahead > 0);
  CHECK_EQ(late.ahead, int64_t{0});

  // What was not said, or for another token, is a mistake of the caller's, and nobody else's.
  host->add_request("untold", {1, 2}, greedy(5), 0, allowed(0));
  host->add_request("other", {1, 2}, greedy(3));
  host->step();
  CHECK(!host->allow_tokens("untold", 0, 0, allowed(0)));
  CHECK(!host->allow_tokens("untold", 0, 2, allowed(2)));
  CHECK_THROWS(InternalError, "other[0] is not guided", host->allow_tokens("other", 0, 1, allowed(1)));
  CHECK_THROWS(InternalError, "has 1 words", host->add_request("short", {1}, greedy(5), 0, {1}));
  CHECK(!host->allow_tokens("nobody", 0, 1, allowed(1)));
  CHECK(!host->allow_tokens("untold", 1, 1, allowed(1)));
  const std::vector<StepOutput> outputs = host->step();
  CHECK(outputs.at(0).finish_reason == FinishReason::kError);
  while (host->has_unfinished_requests()) host->step();
  check_all_free(*host);
}

// The record of steps that overlap: a replay has the blocks that the engine had.
TEST(events_of_steps_that_start_early) {
  SamplingBackend::Log log;
  const auto engine = make_engine(std::make_unique<SamplingBackend>(log), "continuous", false, true);
  const Answers answers = run_mixed(*engine);
  const EventLog& events = *engine->events();
  std::vector<std::vector<int32_t>> tables(events.sequences().size());
  std::map<std::pair<std::string, int64_t>, std::vector<int32_t>> tokens;
  double scheduled = 0;
  for (const StepEvents& step : events.steps()) {
    for (int32_t s : step.released) tables.at(s).clear();
    for (int32_t s : step.preempted) tables.at(s).clear();
    for (const auto& [s, first, blocks] : step.tables) {
      tables.at(s).resize(first);
      tables.at(s).insert(tables.at(s).end(), blocks.begin(), blocks.end());
    }
    std::vector<bool> owned(engine->allocator().num_blocks(), false);
    for (const auto& table : tables)
      for (int32_t block : table) owned.at(block) = true;
    CHECK_EQ(std::ranges::count(owned, false), step.free_blocks);
    for (const auto& [s, start, count] : step.chunks)
      CHECK(start + count <= std::ssize(tables.at(s)) * engine->options().block_size);
    for (const auto& [s, token, reason] : step.sampled) {
      const SequenceEvents& sequence = events.sequences().at(s);
      tokens[{sequence.request_id, sequence.index}].push_back(token);
    }
    CHECK(step.schedule_start >= scheduled);
    scheduled = step.schedule_start;
    CHECK(step.end >= step.forward_end && step.forward_end >= step.forward_start);
  }
  for (const auto& table : tables) CHECK(table.empty());
  for (const auto& [key, answer] : answers) CHECK(tokens.at(key) == answer.tokens);
  CHECK(log.ahead > 0);
  CHECK(make_engine(std::make_unique<Wrapped>())->events() == nullptr);
}

// What was found out about a text while steps ran ahead is in the prefix cache, token for token.
TEST(the_prefix_cache_is_the_same_when_steps_start_early) {
  SamplingBackend::Log log;
  for (const bool eager : {false, true}) {
    const auto engine = make_engine(std::make_unique<SamplingBackend>(log), "continuous", eager);
    engine->add_request("a", {1, 2, 3, 4, 5}, greedy(12));
    std::vector<int32_t> text = {1, 2, 3, 4, 5};
    for (int32_t token : run_to_the_end(*engine, "a")) text.push_back(token);
    CHECK_EQ(engine->allocator().cached_blocks(), int64_t{4});  // of 17 tokens, the last of which was never an input
    engine->add_request("b", text, greedy(1));
    const std::vector<StepOutput> outputs = engine->step();
    CHECK_EQ(outputs.at(0).num_cached_tokens, int64_t{16});
  }
}

TEST(a_device_that_fails_late_ends_the_requests_under_way) {
  for (const std::string op : {"sample", "receive"}) {
    SamplingBackend::Log log;
    const auto engine = make_engine(std::make_unique<SamplingBackend>(log));
    engine->add_request("a", {20, 21, 22, 23, 24}, greedy(8));
    engine->add_request("b", {1, 2, 3}, greedy(8));
    CHECK_EQ(engine->step().size(), size_t{2});
    log.fails_in = op;
    Answers answers;
    while (engine->has_unfinished_requests()) collect(engine->step(), answers);
    CHECK_EQ(answers.size(), size_t{2});
    for (const auto& [key, answer] : answers) CHECK(answer.reason == FinishReason::kError);
    check_all_free(*engine);
    log.fails_in = "";
    engine->add_request("a", {1, 2, 3}, greedy(3));
    CHECK_EQ(run_to_the_end(*engine, "a").size(), size_t{3});
  }
}

TEST(a_request_that_is_aborted_under_way_leaves_nothing_behind) {
  SamplingBackend::Log log;
  const auto engine = make_engine(std::make_unique<SamplingBackend>(log));
  engine->add_request("a", {1, 2, 3}, greedy(8));
  engine->step();
  CHECK(engine->abort_request("a"));
  check_all_free(*engine);
  engine->add_request("a", {20, 21, 22, 23, 24}, greedy(3));  // the same id, while the old one's step is under way
  const std::vector<int32_t> tokens = run_to_the_end(*engine, "a");
  engine->add_request("b", {20, 21, 22, 23, 24}, greedy(3));
  CHECK(run_to_the_end(*engine, "b") == tokens);
  check_all_free(*engine);
}

// On a device that is a step ahead, and on one that is not. The other sequence goes on with the tokens it would have.
TEST(one_sequence_can_be_stopped_and_the_others_go_on) {
  SamplingBackend::Log log;
  for (const bool ahead : {false, true}) {
    const auto engine = make_engine(std::make_unique<SamplingBackend>(log), "continuous", !ahead);
    SamplingParams params = greedy(6, 2);
    params.seed = 5;
    engine->add_request("whole", {1, 2, 3}, params);
    Answers whole, stopped;
    while (engine->has_unfinished_requests()) collect(engine->step(), whole);
    CHECK_EQ(whole.size(), size_t{2});

    engine->add_request("a", {1, 2, 3}, params);
    CHECK(!engine->stop_sequence("a", 1));  // it has not begun
    while (stopped[{"a", 1}].tokens.size() < 2) collect(engine->step(), stopped);
    const int64_t finished = engine->metrics().num_finished;
    CHECK(engine->stop_sequence("a", 1));
    CHECK(!engine->stop_sequence("a", 1));
    CHECK(!engine->stop_sequence("a", 2));
    CHECK(!engine->stop_sequence("a", -1));
    CHECK(!engine->stop_sequence("b", 0));
    CHECK_EQ(engine->metrics().num_finished, finished + 1);
    CHECK(engine->has_request("a"));
    while (engine->has_unfinished_requests()) collect(engine->step(), stopped);
    CHECK((stopped[{"a", 0}].tokens == whole[{"whole", 0}].tokens));
    CHECK((stopped[{"a", 1}].tokens.size() == 2));
    check_all_free(*engine);

    engine->add_request("last", {1, 2, 3}, greedy(6));
    engine->step();
    CHECK(engine->stop_sequence("last", 0));
    CHECK(!engine->has_request("last"));
    CHECK(!engine->has_unfinished_requests());
    CHECK(engine->step().empty());
    check_all_free(*engine);
  }
}

}  // namespace
}  // namespace tiny_vllm
