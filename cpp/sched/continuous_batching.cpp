// Continuous batching: who computes is decided anew in each step (Orca: Yu et al., OSDI 2022; with paged memory, vLLM:
// Kwon et al., arXiv 2309.06180; with prompts cut into chunks, Sarathi-Serve: Agrawal et al., arXiv 2403.02310).
//
// A step has a budget of max_num_batched_tokens and is filled in this order:
//   1. Decodes of running requests, one token each: people are reading them.
//   2. Admission of waiting requests, in their order: by priority, and among equals first come, first served.
//   3. Prefills, in chunks.
//   4. Decodes that did not fit into their share, if something is left.
//
// "Oldest" and "newest" below mean first and last in that order. A waiting request that lacks a seat or blocks takes
// them from running ones of a larger priority number, which wait and are computed again later.
//
// Among requests of one priority nobody is starved:
//   - Decodes leave a quarter of the budget to prefills as long as there are any. When there are more decodes than
//     their share, those who have waited longest go first.
//   - The oldest prefill gets at least half of what the decodes leave, so an eighth of the budget B. A prompt of P
//     tokens is therefore computed at most ceil(P / ceil(B/8)) steps after it has become the oldest, whatever else
//     arrives. (With B = 1 there is no quarter: a prefill waits until the running decodes have ended. Without chunks
//     there is no half: a prompt waits until the decodes before it leave enough room for the whole of it.)
//   - The other half goes to the shortest remaining prefills: a short question does not wait behind long documents,
//     and cannot hold up the oldest of them.
//   - Nobody overtakes in the waiting queue. The oldest running request is never preempted for another, and alone it
//     fits into the pool (Scheduler::add sees to it), so it ends; then the next one is the oldest.
#include <algorithm>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sched/scheduler.h"

namespace tiny_vllm {

namespace {

class ContinuousBatching : public Scheduler {
 public:
  using Scheduler::Scheduler;

  StepPlan schedule() override {
    ++step_;
    StepPlan plan;
    make_room_for_first(plan);
    const size_t num_preempted = plan.preempted.size();
    std::vector<Request*> decodes;
    std::vector<Request*> prefills;
    for (Request* request : running_)
      if (request->num_uncomputed_tokens() > 0) (is_prefill(*request) ? prefills : decodes).push_back(request);
    const int64_t budget = config_.max_num_batched_tokens;
    const bool prefill_pending = !prefills.empty() || !waiting_.empty();
    const int64_t decode_share = prefill_pending ? std::max<int64_t>(1, budget - ceil_div(budget, 4)) : budget;
    bring_forward(decodes, decode_share);

    schedule_decodes(decodes, decode_share, plan);
    // Who lacks blocks for the old takes in nobody new.
    if (plan.preempted.size() == num_preempted) admit(prefills, plan);
    std::erase_if(prefills, is_waiting);
    if (config_.enable_chunked_prefill) {
      schedule_prefill_chunks(prefills, plan);
    } else {
      schedule_whole_prefills(prefills, plan);
    }
    schedule_leftover_decodes(decodes, plan);
    return plan;
  }

 private:
  static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
  static bool is_waiting(const Request* request) { return request->state == RequestState::kWaiting; }

  // Preempts requests that the first in the queue goes before by its priority, if it can be admitted then.
  void make_room_for_first(StepPlan& plan) {
    if (waiting_.empty() || running_.empty() || running_.back()->priority <= waiting_.front()->priority) return;
    const Request& first = *waiting_.front();
    // What it finds in the cache need not be free, as long as somebody else holds it.
    int64_t blocks = allocator_.blocks_for(first.num_tokens());
    const std::vector<int32_t> found = find_prefix(first);
    for (int32_t block : found) blocks -= allocator_.ref_count(block) > 0;
    int64_t running = num_sequences(running_), free = allocator_.free_blocks();
    std::unordered_map<int32_t, int64_t> dropped;  // owners that a block would lose
    const auto fits = [&] {
      const int64_t sequences = running + num_sequences(first);
      return sequences <= config_.max_num_seqs && blocks + reserve_beside(running, sequences) <= free;
    };
    size_t count = 0;
    for (; !fits(); ++count) {
      if (count == running_.size()) return;
      const Request& last = *running_[running_.size() - 1 - count];
      if (last.priority <= first.priority) return;
      running -= num_sequences(last);
      for (int32_t block : last.block_table) {
        if (++dropped[block] < allocator_.ref_count(block)) continue;
        ++free;
        blocks += std::ranges::count(found, block);
      }
    }
    for (; count > 0; --count) preempt_last(plan);
  }

  // The first `share` of them, oldest first. When there is no block left for one, the newest running request is
  // preempted, perhaps the one itself. In this order the newest never has tokens in the plan yet.
  void schedule_decodes(const std::vector<Request*>& decodes, int64_t share, StepPlan& plan) {
    for (Request* request : std::span(decodes).first(std::min<size_t>(share, decodes.size()))) {
      while (!is_waiting(request) && !reserve_blocks(*request, request->num_tokens(), plan)) preempt_last(plan);
      if (!is_waiting(request)) schedule_chunk(*request, 1, plan);
    }
  }

  // One free block for each running sequence must remain, or else the newcomer would be thrown out again by the next
  // block that somebody needs.
  static int64_t reserve_beside(int64_t running, int64_t sequences) { return running == 0 ? 0 : sequences; }

  void admit(std::vector<Request*>& prefills, StepPlan& plan) {
    int64_t left = budget_left(plan);
    while (!waiting_.empty() && left > 0) {
      Request* request = waiting_.front();
      const int64_t sequences = num_sequences(running_) + num_sequences(*request);
      if (sequences > config_.max_num_seqs || std::ranges::count(plan.preempted, request) > 0) break;
      const int64_t reserve = reserve_beside(num_sequences(running_), sequences);
      const int64_t max_uncomputed = config_.enable_chunked_prefill ? request->num_tokens() : left;
      if (!try_admit(reserve, max_uncomputed, plan)) break;
      if (!config_.enable_chunked_prefill) left -= request->num_uncomputed_tokens();
      prefills.push_back(request);
    }
  }

  // The oldest has a right to half of the tokens that are left, and takes what the others do not need as well.
  void schedule_prefill_chunks(std::vector<Request*>& prefills, StepPlan& plan) {
    if (prefills.empty()) return;
    for (Request* request : prefills) take_cached_blocks(*request);
    Request* oldest = prefills.front();
    const int64_t left = budget_left(plan);
    int64_t left_for_others = left - std::min(ceil_div(left, 2), oldest->num_uncomputed_tokens());

    std::stable_sort(prefills.begin() + 1, prefills.end(), [](const Request* a, const Request* b) {
      return std::pair(a->priority, a->num_uncomputed_tokens()) < std::pair(b->priority, b->num_uncomputed_tokens());
    });
    std::vector<const Request*> computing = {oldest};
    for (Request* request : std::span(prefills).subspan(1)) {
      if (left_for_others == 0) break;
      if (std::ranges::any_of(computing, [&](const Request* r) { return is_followed(*r, *request); })) continue;
      const int64_t count = std::min(left_for_others, request->num_uncomputed_tokens());
      schedule_chunk(*request, count, plan);
      left_for_others -= count;
      computing.push_back(request);
    }
    const int64_t count = std::min(budget_left(plan), oldest->num_uncomputed_tokens());
    if (count > 0) schedule_chunk(*oldest, count, plan);
  }

  // Whether the block that `leader` computes now is also the next one of `follower`. Then the follower waits a step
  // and finds it in the cache. Many requests with one long prompt in common thus compute it once.
  bool is_followed(const Request& leader, const Request& follower) const {
    if (!allocator_.prefix_caching() || !follower.read_prefix_cache) return false;
    const int64_t block = leader.num_computed_tokens / allocator_.block_size();
    const int64_t end = (block + 1) * allocator_.block_size();
    return follower.num_computed_tokens / allocator_.block_size() == block &&
           leader.cache_salt == follower.cache_salt && end <= leader.num_tokens() && end < follower.num_tokens() &&
           // From the back, where texts that differ do so first.
           std::equal(leader.tokens.rend() - end, leader.tokens.rend(), follower.tokens.rend() - end);
  }

  void schedule_whole_prefills(const std::vector<Request*>& prefills, StepPlan& plan) {
    for (Request* request : prefills) {
      if (request->num_uncomputed_tokens() > budget_left(plan)) break;
      schedule_chunk(*request, request->num_uncomputed_tokens(), plan);
    }
  }

  // Beyond their share, and without preempting anybody for it.
  void schedule_leftover_decodes(const std::vector<Request*>& decodes, StepPlan& plan) {
    for (Request* request : decodes) {
      if (is_waiting(request) || request->last_scheduled_step == step_) continue;
      if (budget_left(plan) == 0) break;
      if (reserve_blocks(*request, request->num_tokens(), plan)) schedule_chunk(*request, 1, plan);
    }
  }
};

}  // namespace

std::unique_ptr<Scheduler> make_continuous_batching(const SchedulerConfig& config, BlockAllocator& allocator) {
  return std::make_unique<ContinuousBatching>(config, allocator);
}

}  // namespace tiny_vllm
