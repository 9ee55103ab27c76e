// The engine: requests in, tokens out, one step at a time.
//
// A step is: the scheduler picks chunks of requests, the transformer runs over their tokens, and each request whose
// last known token was among them gets its next one. Text is somebody else's work (Python): here are only token ids.
//
// Where the device chooses the tokens, the host does not wait for them to start the next step: it schedules step n + 1
// while step n runs, as if nobody would stop, and the device puts the tokens of step n into step n + 1 itself. What was
// computed for a request that did stop is thrown away.
//
//   device   | step n       | step n+1     | step n+2     |
//   host      start n+1  take n  start n+2  take n+1  start n+3
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "backend/backend.h"
#include "engine/event_log.h"
#include "kv/block_allocator.h"
#include "model/transformer.h"
#include "sample/sampler.h"
#include "sched/request.h"
#include "sched/scheduler.h"

namespace tiny_vllm {

// Defaults live in Python (EngineConfig); here every field is given.
struct EngineOptions {
  BackendOptions backend;  // what the engine's backend was made from
  DType dtype = DType::kBFloat16;
  bool dummy_weights = false;
  uint64_t seed = 0;
  std::vector<int32_t> eos_token_ids;

  int64_t block_size = 0;
  int64_t max_model_len = 0;                 // 0: as config.json says
  int64_t max_num_seqs = 0;                  // 0: the backend's default,
  int64_t max_num_batched_tokens = 0;        // here too
  int64_t kv_cache_memory_bytes = 0;         // 0: memory_utilization of what is free
  std::optional<double> memory_utilization;  // none: the backend's default
  std::string scheduler;
  std::string scheduling_policy;  // fcfs, or priority
  bool enable_prefix_caching = true;
  bool enable_chunked_prefill = true;
  bool record_events = false;
};

// What a step has to say about one sequence: usually a new token.
struct StepOutput {
  std::string request_id;
  int64_t index = 0;                                       // which of the n outputs
  int32_t token = -1;                                      // -1: none, the request ended in another way
  std::vector<TokenLogprob> logprobs;                      // of the token, when asked for: it, then the most likely
  std::vector<std::vector<TokenLogprob>> prompt_logprobs;  // with a request's first output; element i is of token i+1
  FinishReason finish_reason = FinishReason::kNone;
  std::optional<int32_t> stop_token;  // the entry of stop_token_ids that ended it
  std::string error;                  // with FinishReason::kError
  int64_t num_cached_tokens = 0;
};

struct EngineMetrics {
  int64_t num_steps = 0;
  int64_t num_prompt_tokens = 0;  // of admitted requests, prefix hits included
  int64_t num_generated_tokens = 0;
  int64_t num_computed_tokens = 0;  // rows that went through the transformer, recomputation included
  int64_t num_preemptions = 0;
  int64_t num_finished = 0;
  int64_t num_aborted = 0;
  int64_t bytes_read = 0;  // weights once a step, keys and values once a request and step
  double schedule_seconds = 0;
  double forward_seconds = 0;
  double sample_seconds = 0;
};

// Not for two callers at once: Python holds a lock around each call.
class Engine {
 public:
  // config_json is the text of config.json; source its name, for messages. folder holds the safetensors files.
  // The backend is the engine's own from then on.
  // Throws ModelLoadError, InvalidRequestError (an option), OutOfMemoryError or DeviceError; nothing is leaked then.
  Engine(const std::string& config_json, const std::string& source, const std::string& folder, EngineOptions options,
         std::unique_ptr<Backend> backend, const LoadProgress& progress);
  ~Engine();

  // priority: smaller goes first; other than 0 with scheduling_policy "priority" only.
  // allowed: not empty for a guided request, whose caller says before each token which ones may come, a bit each,
  // (ceil(V / 32)). These are for the first; allow_tokens() then says it for each sequence and further token.
  // Throws InvalidRequestError: the id is in use, no tokens, a token outside the vocabulary, a parameter out of range,
  // or a prompt that can never fit. The engine is as before then.
  void add_request(const std::string& id, std::vector<int32_t> prompt, const SamplingParams& params,
                   int64_t priority = 0, std::vector<uint32_t> allowed = {});

  // For a guided request, after each step that has brought a token: what may come as token number `num_output_tokens`
  // (from 0) of this sequence. False, and no change, when it has ended, or when it is another token's turn.
  bool allow_tokens(const std::string& id, int64_t index, int64_t num_output_tokens, std::vector<uint32_t> allowed);

  // Ends all sequences of the request and gives their blocks back. False if there is no such request.
  bool abort_request(const std::string& id);

  // Ends one sequence of the request, for a caller who found a stop string in its text (kStop), or who cannot go on
  // with it (kError). False if it has ended already, or if there is no such sequence.
  bool stop_sequence(const std::string& id, int64_t index, FinishReason reason = FinishReason::kStop);

  // Runs one step. Empty when there was nothing to do. When the forward pass fails (no memory, a device error), the
  // requests that were part of the step end with FinishReason::kError and the reason; the others go on. When this
  // returns, the next step may be under way.
  std::vector<StepOutput> step();

  bool has_unfinished_requests() const { return !requests_.empty(); }
  bool has_request(const std::string& id) const { return requests_.count(id) != 0; }  // unfinished
  int64_t max_total_len() const { return scheduler_->max_total_len(); }  // tokens of one request, prompt and output

  const EngineOptions& options() const { return options_; }
  const EngineMetrics& metrics() const { return metrics_; }
  const BlockAllocator& allocator() const { return *allocator_; }
  const Scheduler& scheduler() const { return *scheduler_; }
  const Transformer& transformer() const { return *transformer_; }
  const Backend& backend() const { return *backend_; }
  std::vector<KernelRecord> take_profile() { return backend_->take_profile(); }

  // With EngineOptions::record_events, what has happened up to now; else null.
  const EventLog* events();

 private:
  // The sequences of one add_request() call, and what is collected for them.
  struct Group {
    std::vector<std::shared_ptr<Request>> sequences;
    std::vector<std::vector<TokenLogprob>> prompt_logprobs;
    int64_t num_unfinished = 0;
    bool forked = false;
  };

  // Seconds since the last call of lap(), or since construction.
  class Stopwatch {
   public:
    double lap() {
      const auto now = std::chrono::steady_clock::now();
      const double seconds = std::chrono::duration<double>(now - last_).count();
      last_ = now;
      return seconds;
    }

   private:
    std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
  };

  // One row of logits that a step has to look at: for the next token of a sequence, or for a prompt logprob.
  struct LogitsRow {
    Request* request;
    int64_t position;  // of the token that was the row's input
  };

  // A step under way. Its requests may end before it does.
  struct Flight {
    std::vector<std::shared_ptr<Request>> requests;
    std::vector<LogitsRow> rows;
    bool sampled = false;  // the device chooses a token for each row
    int64_t ticket = 0;
    int64_t events = -1;  // the step's number in the log, if there is one
  };

  int64_t choose_num_blocks(double utilization) const;
  bool start(std::vector<StepOutput>& outputs);
  void launch(const StepPlan& plan, Flight& flight, Stopwatch& watch);
  void take(const Flight& flight, std::vector<StepOutput>& outputs);
  void take_tokens(const Flight& flight, const Sampled& sampled, std::vector<StepOutput>& outputs);
  void take_logits(const Flight& flight, Stopwatch& watch, std::vector<StepOutput>& outputs);
  void give_up(const Flight& flight, const char* error, std::vector<StepOutput>& outputs);
  void expect_tokens(const Flight& flight);
  StepBatch make_batch(const StepPlan& plan, std::vector<LogitsRow>& rows) const;
  bool device_can_sample(const std::vector<LogitsRow>& rows) const;
  void add_sampling(const std::vector<LogitsRow>& rows, StepBatch& batch) const;
  void take_row(const LogitsRow& row, std::span<const float> logits, std::vector<StepOutput>& outputs);
  void sample(Request& request, std::span<const float> logits, std::vector<StepOutput>& outputs);
  void append_token(Request& request, int32_t token, std::vector<TokenLogprob> logprobs,
                    std::vector<StepOutput>& outputs);
  void guide(Request& request, std::vector<uint32_t> allowed) const;
  void require_guidance(const std::vector<LogitsRow>& rows) const;
  void fork(Request& parent);
  void finish(Request& request, FinishReason reason);
  void end_sequence(Request& request, FinishReason reason);

  EngineOptions options_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Transformer> transformer_;
  std::unique_ptr<BlockAllocator> allocator_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<EventLog> log_;  // null: nobody wants to know
  int64_t events_ = -1;            // the number in it of the step that is being taken
  Sampler sampler_;
  std::unordered_map<std::string, Group> requests_;
  std::deque<Flight> flights_;  // oldest first
  std::vector<float> logits_;   // (at most max_logits_rows_, V), where the host looks at them
  int64_t max_logits_rows_ = 0;
  uint64_t next_arrival_ = 0;
  EngineMetrics metrics_;
};

}  // namespace tiny_vllm
