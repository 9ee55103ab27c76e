// One small run of each policy, step by step, to be read beside the code. tests/test_scheduler.py goes further.
#include <string>
#include <vector>

#include "check.h"
#include "sched/scheduler.h"

namespace tiny_vllm {
namespace {

Request make_request(const std::string& id, uint64_t arrival, int64_t prompt, int64_t max_tokens, int64_t n = 1) {
  Request request;
  request.id = id;
  request.arrival = arrival;
  request.params.n = n;
  for (int64_t i = 0; i < prompt; ++i) request.tokens.push_back(static_cast<int32_t>(1000 * arrival + i));
  request.num_prompt_tokens = prompt;
  request.max_total_tokens = prompt + max_tokens;
  return request;
}

// "a[0,8) b[0,4)": the chunks of the plan.
std::string text_of(const StepPlan& plan) {
  std::string text;
  for (const auto& [request, start, count] : plan.chunks) {
    text += (text.empty() ? "" : " ") + str(request->id, "[", start, ",", start + count, ")");
  }
  return text;
}

// One step of an engine whose model always answers 7.
std::string step(Scheduler& scheduler) {
  const StepPlan plan = scheduler.schedule();
  scheduler.commit(plan);
  for (const auto& [request, start, count] : plan.chunks) {
    if (start + count < request->num_tokens()) continue;
    request->tokens.push_back(7);
    if (request->num_tokens() == request->max_total_tokens) scheduler.remove(request);
  }
  scheduler.check_invariants();
  return text_of(plan);
}

TEST(continuous_batching_mixes_decodes_and_prefills) {
  BlockAllocator blocks(64, 4, true);
  const auto scheduler = make_scheduler("continuous", {4, 8, 100, true}, blocks);
  Request a = make_request("a", 0, 4, 8), b = make_request("b", 1, 20, 1), c = make_request("c", 2, 3, 1);
  scheduler->add(&a);
  CHECK_EQ(step(*scheduler), "a[0,4)");
  scheduler->add(&b);
  CHECK_EQ(step(*scheduler), "a[4,5) b[0,7)");
  scheduler->add(&c);
  CHECK_EQ(step(*scheduler), "a[5,6) c[0,3) b[7,11)");  // the short one first, and at least half for b
  CHECK_EQ(step(*scheduler), "a[6,7) b[11,18)");
  CHECK_EQ(step(*scheduler), "a[7,8) b[18,20)");
  CHECK_EQ(step(*scheduler), "a[8,9)");
  CHECK(b.state == RequestState::kFinished && c.state == RequestState::kFinished);
  CHECK_EQ(scheduler->running().size(), size_t{1});
}

TEST(static_batching_waits_for_the_slowest) {
  BlockAllocator blocks(64, 4, true);
  const auto scheduler = make_scheduler("static", {2, 8, 100, true}, blocks);
  Request a = make_request("a", 0, 4, 4), b = make_request("b", 1, 10, 1), c = make_request("c", 2, 3, 1);
  for (Request* r : {&a, &b, &c}) scheduler->add(r);
  CHECK_EQ(step(*scheduler), "a[0,4) b[0,4)");
  CHECK_EQ(step(*scheduler), "b[4,10)");
  CHECK(b.state == RequestState::kFinished);
  CHECK_EQ(step(*scheduler), "a[4,5)");
  CHECK_EQ(step(*scheduler), "a[5,6)");
  CHECK_EQ(step(*scheduler), "a[6,7)");
  CHECK_EQ(step(*scheduler), "c[0,3)");
  CHECK(!scheduler->has_unfinished());
  CHECK_EQ(blocks.owned_blocks(), 0);
}

TEST(the_newest_is_preempted_when_blocks_run_out) {
  BlockAllocator blocks(6, 2, false);
  const auto scheduler = make_scheduler("continuous", {2, 8, 100, true}, blocks);
  Request a = make_request("a", 0, 3, 9), b = make_request("b", 1, 3, 9);
  scheduler->add(&a);
  scheduler->add(&b);
  CHECK_EQ(step(*scheduler), "b[0,3) a[0,3)");
  CHECK_EQ(step(*scheduler), "a[3,4) b[3,4)");
  CHECK_EQ(step(*scheduler), "a[4,5) b[4,5)");  // now all 6 blocks are owned, and full after the next
  CHECK_EQ(step(*scheduler), "a[5,6) b[5,6)");
  const StepPlan plan = scheduler->schedule();
  CHECK_EQ(text_of(plan), "a[6,7)");
  CHECK_EQ(plan.preempted.size(), size_t{1});
  CHECK(plan.preempted.at(0) == &b && b.state == RequestState::kWaiting && b.block_table.empty());
  CHECK_EQ(b.num_tokens(), 7);  // what it has generated is kept, and computed again
  scheduler->commit(plan);
  scheduler->check_invariants();
  scheduler->remove(&a);
  CHECK_EQ(step(*scheduler), "b[0,7)");
}

TEST(a_fork_shares_blocks_until_it_writes) {
  BlockAllocator blocks(8, 4, true);
  const auto scheduler = make_scheduler("continuous", {2, 8, 100, true}, blocks);
  Request parent = make_request("a", 0, 6, 2, 2);
  scheduler->add(&parent);
  scheduler->commit(scheduler->schedule());
  Request child = parent;
  child.index = 1;
  scheduler->fork(&parent, &child);
  CHECK(child.block_table == parent.block_table);
  CHECK_EQ(blocks.owned_blocks(), 2);
  parent.tokens.push_back(7);
  child.tokens.push_back(8);
  scheduler->check_invariants();

  const StepPlan plan = scheduler->schedule();
  CHECK_EQ(text_of(plan), "a[6,7) a[6,7)");
  CHECK_EQ(plan.copies.size(), size_t{1});  // the first to write takes a copy, the other has the block for itself
  CHECK_EQ(plan.copies.at(0).src, child.block_table.at(1));
  CHECK_EQ(plan.copies.at(0).dst, parent.block_table.at(1));
  CHECK_EQ(child.block_table.at(0), parent.block_table.at(0));
  scheduler->commit(plan);
  scheduler->remove(&parent);
  scheduler->remove(&child);
  scheduler->check_invariants();
  CHECK_EQ(blocks.owned_blocks(), 0);
}

TEST(what_can_never_fit_is_refused) {
  BlockAllocator blocks(10, 16, true);
  const auto scheduler = make_scheduler("continuous", {4, 64, 4096, true}, blocks);
  Request b = make_request("b", 0, 200, 1);
  CHECK_THROWS(InvalidRequestError, "prompt has 200 tokens and needs room for 201; there is room for 160",
               scheduler->add(&b));
  CHECK(!scheduler->has_unfinished());
  CHECK_THROWS(InvalidRequestError, "scheduler is \"fifo\"", make_scheduler("fifo", {4, 64, 4096, true}, blocks));
  CHECK_THROWS(InvalidRequestError, "without chunked prefill",
               make_scheduler("continuous", {4, 64, 4096, false}, blocks));
}

}  // namespace
}  // namespace tiny_vllm
