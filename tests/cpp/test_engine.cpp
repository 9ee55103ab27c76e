// A step whose forward pass fails: its requests end with the reason, the others go on, and no block is lost.
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "engine/engine.h"

namespace tiny_vllm {
namespace {

// The CPU backend, which fails in the one op that `fails_in` names.
class FailingBackend final : public Backend {
 public:
  explicit FailingBackend(const std::string& fails_in)
      : fails_in_(fails_in), inner_(make_backend({.device = "cpu", .num_threads = 1})) {}

  std::string description() const override { return inner_->description(); }
  MemoryInfo memory() const override { return inner_->memory(); }
  Buffer allocate(int64_t bytes) override { return inner_->allocate(bytes); }
  void upload(void* device, const void* host, int64_t bytes) override { inner_->upload(device, host, bytes); }
  void download(void* host, const void* device, int64_t bytes) override { inner_->download(host, device, bytes); }
  void fill_zero(void* device, int64_t bytes) override { inner_->fill_zero(device, bytes); }
  void synchronize() override { inner_->synchronize(); }
  DeviceBatch upload(const StepBatch& batch) override { return inner_->upload(batch); }
  void embedding(const Tensor& table, const int32_t* ids, const Tensor& out) override {
    inner_->embedding(table, ids, out);
  }
  void rms_norm(const Tensor& x, const Tensor& weight, float eps, const Tensor& out) override {
    inner_->rms_norm(x, weight, eps, out);
  }
  void add_rms_norm(const Tensor& residual, const Tensor& x, const Tensor& weight, float eps,
                    const Tensor& out) override {
    inner_->add_rms_norm(residual, x, weight, eps, out);
  }
  void matmul(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out) override {
    inner_->matmul(x, weight, bias, out);
  }
  void rope_and_cache(const Tensor& qkv, const Tensor& q_norm, const Tensor& k_norm, float eps,
                      const DeviceBatch& batch, const AttentionShape& shape, const PagedKv& kv) override {
    inner_->rope_and_cache(qkv, q_norm, k_norm, eps, batch, shape, kv);
  }
  void paged_attention(const Tensor& qkv, const DeviceBatch& batch, const AttentionShape& shape, const PagedKv& kv,
                       const Tensor& out) override {
    if (fails_in_ == "attention") throw DeviceError("the device fell off the bus");
    inner_->paged_attention(qkv, batch, shape, kv, out);
  }
  void act_mul(const Tensor& gate_up, Activation activation, const Tensor& out) override {
    inner_->act_mul(gate_up, activation, out);
  }
  void gather_rows(const Tensor& x, const int32_t* rows, const Tensor& out) override {
    if (fails_in_ == "logits") throw std::bad_alloc();
    inner_->gather_rows(x, rows, out);
  }
  void copy_block(const PagedKv& kv, int32_t src, int32_t dst) override {
    if (fails_in_ == "copy") throw DeviceError("the device fell off the bus");
    inner_->copy_block(kv, src, dst);
  }

 private:
  const std::string& fails_in_;
  std::unique_ptr<Backend> inner_;
};

constexpr const char* kConfig = R"({
  "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "rms_norm_eps": 1e-5,
  "max_position_embeddings": 128, "hidden_act": "silu", "tie_word_embeddings": true, "rope_theta": 10000.0
})";

// Two sequences at a time, blocks of 4 tokens, 8 of them.
std::unique_ptr<Engine> make_engine(const std::string& fails_in) {
  EngineOptions options;
  options.dtype = DType::kFloat32;
  options.dummy_weights = true;
  options.block_size = 4;
  options.max_num_seqs = 2;
  options.max_num_batched_tokens = 16;
  options.kv_cache_memory_bytes = 8 * 2 * 2 * 2 * 4 * 8 * 4;  // NB, L, keys and values, Hk, BS, Dh, bytes
  options.scheduler = "continuous";
  return std::make_unique<Engine>(kConfig, "config.json", "", options, std::make_unique<FailingBackend>(fails_in),
                                  nullptr);
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

}  // namespace
}  // namespace tiny_vllm
