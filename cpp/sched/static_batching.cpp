// Static batching: the way of most inference code before Orca (Yu et al., OSDI 2022), kept for comparison.
//
// A batch is put together, all its prompts are computed, and then all its sequences take one token a step, in
// lockstep. Whoever finishes early leaves an empty seat: nobody is admitted until the last one of the batch has ended.
// Blocks are set aside for the longest output that each sequence may have, so that the batch never runs out of them.
// Count the seats and the blocks that stand empty, and you know why continuous batching was invented.
#include <algorithm>

#include "sched/scheduler.h"

namespace tiny_vllm {

namespace {

class StaticBatching : public Scheduler {
 public:
  using Scheduler::Scheduler;

  StepPlan schedule() override {
    ++step_;
    StepPlan plan;
    if (running_.empty()) admit_batch(plan);
    schedule_prefills(plan);
    if (plan.chunks.empty()) schedule_decodes(plan);
    return plan;
  }

 private:
  // For n sequences of the longest length that the request allows.
  int64_t worst_case_blocks(const Request& request) const {
    return request.params.n * allocator_.blocks_for(request.max_total_tokens);
  }

  void check_fits(const Request& request) const override {
    if (worst_case_blocks(request) <= allocator_.num_blocks()) return;
    throw InvalidRequestError(str("n = ", request.params.n, " sequences of up to ", request.max_total_tokens,
                                  " tokens need ", worst_case_blocks(request), " blocks; the KV cache has ",
                                  allocator_.num_blocks(), ". Lower n or max_tokens."));
  }

  void admit_batch(StepPlan& plan) {
    int64_t seats = config_.max_num_seqs;
    int64_t blocks = allocator_.num_blocks();
    while (!waiting_.empty()) {
      const Request& request = *waiting_.front();
      seats -= request.params.n;
      blocks -= worst_case_blocks(request);
      if (seats < 0 || blocks < 0) break;
      TV_CHECK(try_admit(0, request.num_tokens(), plan), "a block that was set aside is not there");
    }
  }

  void schedule_prefills(StepPlan& plan) {
    for (Request* request : running_) {
      if (!is_prefill(*request)) continue;
      take_cached_blocks(*request);
      const int64_t left = budget_left(plan);
      const int64_t uncomputed = request->num_uncomputed_tokens();
      if (left == 0 || (uncomputed > left && !config_.enable_chunked_prefill)) break;
      schedule_chunk(*request, std::min(uncomputed, left), plan);
    }
  }

  // All prompts are computed: one token for each sequence, or for as many as fit into a step, in turn.
  void schedule_decodes(StepPlan& plan) {
    std::vector<Request*> decodes = running_;
    std::erase_if(decodes, [](const Request* request) { return request->num_uncomputed_tokens() == 0; });
    bring_forward(decodes, config_.max_num_batched_tokens);
    for (Request* request : decodes) {
      if (budget_left(plan) == 0) break;
      TV_CHECK(reserve_blocks(*request, request->num_tokens(), plan), "a block that was set aside is not there");
      schedule_chunk(*request, request->num_uncomputed_tokens(), plan);
    }
  }
};

}  // namespace

std::unique_ptr<Scheduler> make_static_batching(const SchedulerConfig& config, BlockAllocator& allocator) {
  return std::make_unique<StaticBatching>(config, allocator);
}

}  // namespace tiny_vllm
