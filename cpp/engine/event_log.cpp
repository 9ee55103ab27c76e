#include "engine/event_log.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace tiny_vllm {

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void EventLog::arrived(Request& request, const Request* parent) {
  request.event_id = static_cast<int32_t>(sequences_.size());
  SequenceEvents sequence;
  sequence.request_id = request.id;
  sequence.index = request.index;
  sequence.parent = parent ? parent->event_id : -1;
  sequence.priority = request.priority;
  sequence.arrival = steady_seconds();
  sequence.num_computed_tokens = request.num_computed_tokens;
  sequence.prompt.assign(request.tokens.begin(), request.tokens.begin() + request.num_prompt_tokens);
  sequences_.push_back(std::move(sequence));
}

int64_t EventLog::scheduled(const Scheduler& scheduler, const StepPlan& plan, std::vector<int32_t> evicted,
                            double start) {
  StepEvents step;
  for (const Request* request : plan.preempted) {
    step.preempted.push_back(request->event_id);
    sequences_.at(request->event_id).block_table.clear();
  }
  for (const Request* request : plan.admitted) {
    step.admitted.push_back({request->event_id, request->num_computed_tokens});
    sequences_.at(request->event_id).num_computed_tokens = request->num_computed_tokens;
  }
  for (const Request* request : scheduler.running()) {
    SequenceEvents& sequence = sequences_.at(request->event_id);
    if (const int64_t found = request->num_computed_tokens - sequence.num_computed_tokens; found > 0) {
      step.hits.push_back({request->event_id, found});
      sequence.num_computed_tokens += found;
    }
    std::vector<int32_t>& known = sequence.block_table;
    const std::vector<int32_t>& table = request->block_table;
    const auto first = std::ranges::mismatch(known, table).in2 - table.begin();
    if (first == std::ssize(table) && known.size() == table.size()) continue;
    step.tables.push_back({request->event_id, first, {table.begin() + first, table.end()}});
    known = table;
  }
  for (const ScheduledChunk& chunk : plan.chunks) {
    step.chunks.push_back(
        {chunk.request->event_id, static_cast<int32_t>(chunk.start), static_cast<int32_t>(chunk.count)});
    sequences_.at(chunk.request->event_id).num_computed_tokens = chunk.start + chunk.count;
  }
  step.released = std::exchange(released_, {});
  step.copies = plan.copies;
  step.evicted = std::move(evicted);
  if (step.released.empty() && step.preempted.empty() && step.admitted.empty() && step.tables.empty() &&
      step.chunks.empty())
    return -1;

  step.schedule_start = start;
  step.num_tokens = plan.num_tokens;
  step.num_running = std::ssize(scheduler.running());
  step.num_waiting = std::ssize(scheduler.waiting());
  step.free_blocks = scheduler.allocator().free_blocks();
  step.cached_blocks = scheduler.allocator().cached_blocks();
  if (plan.chunks.empty()) step.forward_start = step.forward_end = step.end = steady_seconds();
  steps_.push_back(std::move(step));
  return std::ssize(steps_) - 1;
}

void EventLog::sampled(int64_t step, const Request& request, int32_t token, FinishReason reason) {
  steps_.at(step).sampled.push_back({request.event_id, token, reason});
}

void EventLog::finished(const Request& request, FinishReason reason) {
  SequenceEvents& sequence = sequences_.at(request.event_id);
  sequence.end = steady_seconds();
  sequence.finish_reason = reason;
  sequence.block_table.clear();
  released_.push_back(request.event_id);
}

void EventLog::flush(const Scheduler& scheduler) {
  if (!released_.empty()) scheduled(scheduler, {}, {}, steady_seconds());
}

}  // namespace tiny_vllm
