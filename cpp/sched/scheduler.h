// Decides, step by step, which tokens are computed next and in which blocks their keys and values go.
//
// There is one kind of work: "positions [start, start + count) of a request". A prefill has many uncomputed tokens, a
// decode exactly one; a chunk of a long prompt, the rest after a prefix hit and the recomputation after a preemption
// are the same thing with other numbers.
//
//             add             admit (blocks for all known tokens)            remove
//   engine  ------>  waiting  ----------------------------------->  running  ------>  engine
//                       ^                                              |
//                       +----------------------------------------------+
//                          preempt: no block left for a decode, all blocks given back
//
// The engine's step: plan = schedule(); do plan.copies; run the forward pass on plan.chunks; commit(plan); append a
// sampled token to each request whose chunk reached the end of its known tokens; remove() the finished ones. When the
// device runs behind the host, the engine appends a token that only the device knows (Request::row_of_last_token) and
// schedules on.
//
// What a policy is free to choose is who is admitted, who computes, and how much: the two of them are in
// static_batching.cpp and continuous_batching.cpp. What both need is in scheduler.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kv/block_allocator.h"
#include "sched/request.h"

namespace tiny_vllm {

// Positions [start, start + count) of a request. The keys and values of all positions before are in the cache.
struct ScheduledChunk {
  Request* request = nullptr;
  int64_t start = 0;
  int64_t count = 0;
};

struct StepPlan {
  std::vector<ScheduledChunk> chunks;  // at most one for each request; may be empty in a step that only preempted
  std::vector<BlockCopy> copies;       // to be done before the chunks, in this order
  std::vector<Request*> admitted;
  std::vector<Request*> preempted;
  int64_t num_tokens = 0;  // T, the sum of all counts
};

struct SchedulerConfig {
  int64_t max_num_seqs = 0;            // sequences that run at the same time
  int64_t max_num_batched_tokens = 0;  // tokens in one step
  int64_t max_model_len = 0;           // tokens of one sequence, prompt and output
  bool enable_chunked_prefill = true;  // false: a prompt is computed in one step or not yet
};

class Scheduler {
 public:
  // Throws InvalidRequestError when a field of the config is out of range. The allocator must outlive the scheduler,
  // which is its only user.
  Scheduler(const SchedulerConfig& config, BlockAllocator& allocator);
  virtual ~Scheduler() = default;
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // The most tokens that a sequence may reach: max_model_len, or all blocks if that is less.
  int64_t max_total_len() const;

  // Puts a new request into the queue; the caller keeps it alive until remove(). request->max_total_tokens is lowered
  // to max_total_len(), so that no request can outgrow the pool when it runs alone.
  // Throws InvalidRequestError when the request could never run: the message has the need and the capacity.
  void add(Request* request);

  // Takes a request out, in any state, and gives all its blocks back. Not between schedule() and commit(),
  // unless the plan has failed: then all its requests must go, for their blocks may hold anything.
  void remove(Request* request);

  virtual StepPlan schedule() = 0;

  // The keys and values of the plan's chunks are now written, or will be before those of any later plan.
  void commit(const StepPlan& plan);

  // Offers the blocks that the request's computed tokens have filled to the prefix cache. commit() does so; after it,
  // when a token has become known whose keys and values were computed before.
  void register_blocks(Request& request);

  // Between commit() and the next schedule(), when the prompt of a request with params.n > 1 is computed: `child`, a
  // copy of `parent` with its own index, shares the parent's blocks and runs right after it. A block that is not full
  // is copied by whoever writes to it first. Each of the n sequences then goes its own way.
  void fork(Request* parent, Request* child);

  bool has_unfinished() const { return !running_.empty() || !waiting_.empty(); }
  // Both in the order in which requests have their turn: by priority, and among equals by arrival.
  const std::vector<Request*>& running() const { return running_; }
  const std::vector<Request*>& waiting() const { return waiting_; }
  const SchedulerConfig& config() const { return config_; }
  const BlockAllocator& allocator() const { return allocator_; }

  // Throws InternalError when blocks and block tables disagree, or a queue holds what it should not.
  void check_invariants() const;

 protected:
  // Beyond what holds for each policy: throws InvalidRequestError when this one could never run the request.
  virtual void check_fits(const Request&) const {}

  // Sequences that a running request counts for: with params.n > 1 it becomes n of them at its first output token.
  static int64_t num_sequences(const Request& request) {
    return request.num_output_tokens() == 0 ? request.params.n : 1;
  }
  static int64_t num_sequences(const std::vector<Request*>& requests);

  // A prompt is a prefill up to its last token, however it is cut. Tokens computed again after a preemption are one as
  // long as more than one is missing.
  static bool is_prefill(const Request& request) {
    return request.num_computed_tokens < request.num_prompt_tokens || request.num_uncomputed_tokens() > 1;
  }

  int64_t budget_left(const StepPlan& plan) const { return config_.max_num_batched_tokens - plan.num_tokens; }

  // Blocks of the cache that hold the beginning of the request's known tokens. The last known token is never among
  // them: it is always computed, because its logits are wanted.
  std::vector<int32_t> find_prefix(const Request& request) const;

  // Looks for a cached prefix and allocates blocks for all other known tokens of the first waiting request, so that
  // its prefill cannot fail midway; then it runs. False, and no change, when fewer than `reserve` blocks would stay
  // free, or when more than `max_uncomputed` tokens would have to be computed.
  bool try_admit(int64_t reserve, int64_t max_uncomputed, StepPlan& plan);

  // What the cache has learnt since admission. Of several requests with the same beginning, one computes it and the
  // others follow: their own blocks for it, not computed yet, are exchanged for the ones found.
  void take_cached_blocks(Request& request);

  // Makes positions [num_computed_tokens, end) writable: new blocks, and a copy of a shared one.
  // False, and no change, when there are not enough free blocks.
  [[nodiscard]] bool reserve_blocks(Request& request, int64_t end, StepPlan& plan);

  // The next `count` uncomputed tokens of a running request, whose blocks are there.
  void schedule_chunk(Request& request, int64_t count, StepPlan& plan);

  // The last in order of the running requests gives its blocks back and waits, at its place, to be computed again.
  void preempt_last(StepPlan& plan);

  // When only `count` of these can be scheduled: brings those who have waited longest to the front, in their order,
  // and leaves the others behind them. Among requests of one priority nobody waits longer than the others need to
  // have their turn.
  static void bring_forward(std::vector<Request*>& requests, int64_t count);

  const SchedulerConfig config_;
  BlockAllocator& allocator_;
  std::vector<Request*> running_;
  std::vector<Request*> waiting_;
  uint64_t step_ = 0;  // calls of schedule()

 private:
  void release_blocks(Request& request);
};

std::unique_ptr<Scheduler> make_static_batching(const SchedulerConfig& config, BlockAllocator& allocator);
std::unique_ptr<Scheduler> make_continuous_batching(const SchedulerConfig& config, BlockAllocator& allocator);

// policy: "static" or "continuous"; throws InvalidRequestError for any other.
std::unique_ptr<Scheduler> make_scheduler(const std::string& policy, const SchedulerConfig& config,
                                          BlockAllocator& allocator);

}  // namespace tiny_vllm
