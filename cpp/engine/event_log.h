// What the engine did, step by step: a record of decisions that were made anyway, for people to look at afterwards.
//
// Nothing in the engine asks the log. After each schedule() it looks at the scheduler and notes what has changed, so
// the scheduler need not know of it. Everything is kept until the engine goes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kv/block_allocator.h"
#include "sched/request.h"
#include "sched/scheduler.h"

namespace tiny_vllm {

// Times are seconds of the steady clock, which Python's time.monotonic() reads too.
double steady_seconds();

struct SequenceEvents {
  std::string request_id;
  int64_t index = 0;    // which of the n outputs
  int64_t parent = -1;  // the sequence it was forked from; -1: none
  int64_t priority = 0;
  double arrival = 0;
  double end = -1;  // -1: not yet
  FinishReason finish_reason = FinishReason::kNone;
  std::vector<int32_t> prompt;
  // As far as the steps have told:
  std::vector<int32_t> block_table;
  int64_t num_computed_tokens = 0;
};

// A sequence is a number here: its place in EventLog::sequences().
struct StepEvents {
  struct Admission {
    int32_t sequence;
    int64_t num_cached_tokens;  // found in the prefix cache
  };
  struct TableChange {
    int32_t sequence;
    int64_t first;  // from this place on
    std::vector<int32_t> blocks;
  };
  struct Chunk {
    int32_t sequence;
    int32_t start, count;
  };
  struct Token {
    int32_t sequence;
    int32_t token;
    FinishReason finish_reason;
  };

  // schedule() began; the forward pass began; it ended; its tokens were chosen. 0 while not yet.
  double schedule_start = 0, forward_start = 0, forward_end = 0, end = 0;
  int64_t num_tokens = 0;  // of the budget
  int64_t num_running = 0, num_waiting = 0;
  int64_t free_blocks = 0, cached_blocks = 0;  // free_blocks counts the cached ones too
  std::vector<int32_t> released;               // sequences that ended since the last schedule()
  std::vector<int32_t> preempted;
  std::vector<Admission> admitted;
  std::vector<Admission> hits;  // found in the prefix cache by sequences that ran already
  std::vector<TableChange> tables;
  std::vector<BlockCopy> copies;
  std::vector<int32_t> evicted;
  std::vector<Chunk> chunks;
  std::vector<Token> sampled;
};

class EventLog {
 public:
  // A new sequence: a request, or a child of `parent`.
  void arrived(Request& request, const Request* parent = nullptr);

  // schedule() has made the plan, beginning at `start`; commit() comes later. Returns the number of the step's record,
  // for what follows; -1 when nothing at all has happened and there is none.
  int64_t scheduled(const Scheduler& scheduler, const StepPlan& plan, std::vector<int32_t> evicted, double start);

  void forward_started(int64_t step) { steps_.at(step).forward_start = steady_seconds(); }
  void forward_ended(int64_t step) { steps_.at(step).forward_end = steady_seconds(); }
  void ended(int64_t step) { steps_.at(step).end = steady_seconds(); }

  void sampled(int64_t step, const Request& request, int32_t token, FinishReason reason);

  // The request has ended in whatever way.
  void finished(const Request& request, FinishReason reason);

  // What has ended since the last step becomes a record without chunks.
  void flush(const Scheduler& scheduler);

  const std::vector<SequenceEvents>& sequences() const { return sequences_; }
  const std::vector<StepEvents>& steps() const { return steps_; }

 private:
  std::vector<SequenceEvents> sequences_;
  std::vector<StepEvents> steps_;
  std::vector<int32_t> released_;  // since the last record
};

}  // namespace tiny_vllm
