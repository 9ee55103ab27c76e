#include "sched/scheduler.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

namespace tiny_vllm {

namespace {

bool goes_before(const Request* a, const Request* b) {
  return std::tuple(a->priority, a->arrival, a->index) < std::tuple(b->priority, b->arrival, b->index);
}

void insert_in_order(std::vector<Request*>& queue, Request* request) {
  queue.insert(std::upper_bound(queue.begin(), queue.end(), request, goes_before), request);
}

std::string name_of(const Request& request) { return str("request ", request.id, " (output ", request.index, ")"); }

void check_range(const char* field, int64_t value) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (value < 1 || value > kMax) {
    throw InvalidRequestError(str(field, " is ", value, "; it must be between 1 and ", kMax));
  }
}

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config, BlockAllocator& allocator)
    : config_(config), allocator_(allocator) {
  check_range("max_num_seqs", config.max_num_seqs);
  check_range("max_num_batched_tokens", config.max_num_batched_tokens);
  check_range("max_model_len", config.max_model_len);
  if (!config.enable_chunked_prefill && config.max_num_batched_tokens < config.max_model_len) {
    throw InvalidRequestError(str("max_num_batched_tokens is ", config.max_num_batched_tokens,
                                  ", less than max_model_len (", config.max_model_len,
                                  "): without chunked prefill a prompt must fit into one step. Raise "
                                  "max_num_batched_tokens, lower max_model_len or set enable_chunked_prefill."));
  }
}

int64_t Scheduler::max_total_len() const {
  return std::min(config_.max_model_len, allocator_.num_blocks() * allocator_.block_size());
}

// --- Coming and going ---

void Scheduler::add(Request* request) {
  TV_CHECK(request->block_table.empty() && request->num_computed_tokens == 0, name_of(*request), " is not new");
  TV_CHECK(request->num_prompt_tokens == request->num_tokens(), name_of(*request), " is more than its prompt");
  const int64_t prompt = request->num_prompt_tokens;
  if (prompt < 1) throw InvalidRequestError("prompt has no tokens; at least 1 is needed");
  if (prompt + 1 > max_total_len()) {
    throw InvalidRequestError(str("prompt has ", prompt, " tokens and needs room for ", prompt + 1,
                                  "; there is room for ", max_total_len(), " (max_model_len is ", config_.max_model_len,
                                  ", the KV cache has ", allocator_.num_blocks(), " blocks of ",
                                  allocator_.block_size(), " tokens). Shorten the prompt."));
  }
  if (request->params.n < 1 || request->params.n > config_.max_num_seqs) {
    throw InvalidRequestError(
        str("n is ", request->params.n, "; it must be between 1 and max_num_seqs, which is ", config_.max_num_seqs));
  }
  TV_CHECK(request->max_total_tokens > prompt, name_of(*request), " has no token to generate");
  request->max_total_tokens = std::min(request->max_total_tokens, max_total_len());
  check_fits(*request);
  request->state = RequestState::kWaiting;
  insert_in_order(waiting_, request);
}

void Scheduler::remove(Request* request) {
  const size_t removed = std::erase(running_, request) + std::erase(waiting_, request);
  TV_CHECK(removed == 1, name_of(*request), " is in the queues ", removed, " times");
  release_blocks(*request);
  request->state = RequestState::kFinished;
}

void Scheduler::fork(Request* parent, Request* child) {
  TV_CHECK(parent->state == RequestState::kRunning && parent->num_computed_tokens == parent->num_prompt_tokens,
           name_of(*parent), " is forked before or after the end of its prompt");
  TV_CHECK(child->arrival == parent->arrival && child->index > parent->index, name_of(*child), " is no child of ",
           name_of(*parent));
  child->num_computed_tokens = parent->num_computed_tokens;
  child->block_table = parent->block_table;
  allocator_.share(child->block_table);
  child->state = RequestState::kRunning;
  insert_in_order(running_, child);
}

std::vector<int32_t> Scheduler::find_prefix(const Request& request) const {
  if (!request.read_prefix_cache) return {};
  return allocator_.find_prefix({}, request.tokens, request.cache_salt, request.num_tokens() - 1);
}

bool Scheduler::try_admit(int64_t reserve, int64_t max_uncomputed, StepPlan& plan) {
  Request& request = *waiting_.front();
  std::vector<int32_t> table = find_prefix(request);
  allocator_.share(table);
  const int64_t found_tokens = static_cast<int64_t>(table.size()) * allocator_.block_size();
  const int64_t missing = allocator_.blocks_for(request.num_tokens()) - static_cast<int64_t>(table.size());
  if (request.num_tokens() - found_tokens > max_uncomputed || missing + reserve > allocator_.free_blocks()) {
    allocator_.release(table);
    return false;
  }
  TV_CHECK(allocator_.allocate(missing, table), "free blocks have gone");
  request.block_table = std::move(table);
  request.num_computed_tokens = request.num_registered_tokens = found_tokens;
  if (request.num_preemptions == 0) {  // what it finds again of its own after a preemption is no hit
    request.num_cached_tokens = found_tokens;
    if (request.read_prefix_cache) allocator_.count_prefix_lookup(request.num_tokens(), found_tokens);
  }
  waiting_.erase(waiting_.begin());
  request.state = RequestState::kRunning;
  insert_in_order(running_, &request);
  plan.admitted.push_back(&request);
  return true;
}

void Scheduler::preempt_last(StepPlan& plan) {
  Request* request = running_.back();
  TV_CHECK(request->last_scheduled_step != step_, name_of(*request), " is preempted in the step that computes it");
  running_.pop_back();
  release_blocks(*request);
  request->state = RequestState::kWaiting;
  ++request->num_preemptions;
  insert_in_order(waiting_, request);
  plan.preempted.push_back(request);
}

void Scheduler::release_blocks(Request& request) {
  allocator_.release(request.block_table);
  request.block_table.clear();
  request.num_computed_tokens = request.num_registered_tokens = 0;
}

// --- Blocks of a running request ---

void Scheduler::take_cached_blocks(Request& request) {
  if (!request.read_prefix_cache) return;
  const int64_t block_size = allocator_.block_size();
  const int64_t first = request.num_computed_tokens / block_size;  // all blocks before it are computed and registered
  const auto own = request.block_table.begin() + first;
  const std::vector<int32_t> found = allocator_.find_prefix({request.block_table.begin(), own}, request.tokens,
                                                            request.cache_salt, request.num_tokens() - 1);
  if (found.empty()) return;
  const auto found_count = static_cast<int64_t>(found.size());
  allocator_.share(found);
  allocator_.release({own, own + found_count});
  std::copy(found.begin(), found.end(), own);
  const int64_t gained = (first + found_count) * block_size - request.num_computed_tokens;
  request.num_computed_tokens += gained;
  request.num_registered_tokens = request.num_computed_tokens;
  if (request.num_preemptions == 0) {
    request.num_cached_tokens += gained;
    allocator_.count_prefix_lookup(0, gained);
  }
}

bool Scheduler::reserve_blocks(Request& request, int64_t end, StepPlan& plan) {
  std::vector<int32_t>& table = request.block_table;
  const auto held = static_cast<int64_t>(table.size());
  const int64_t first = request.num_computed_tokens / allocator_.block_size();
  // Only the first block written to can be shared: all later ones were allocated for this request alone.
  const bool copy = first < held && !allocator_.is_writable(table[static_cast<size_t>(first)]);
  const int64_t missing = std::max<int64_t>(0, allocator_.blocks_for(end) - held);
  if (missing + copy > allocator_.free_blocks()) return false;
  if (copy) plan.copies.push_back(*allocator_.make_writable(table, first));
  return allocator_.allocate(missing, table);
}

// --- The plan ---

void Scheduler::schedule_chunk(Request& request, int64_t count, StepPlan& plan) {
  TV_CHECK(count >= 1 && count <= request.num_uncomputed_tokens() && count <= budget_left(plan), count, " tokens of ",
           name_of(request), ", which has ", request.num_uncomputed_tokens(), ", with ", budget_left(plan),
           " left in the step");
  plan.chunks.push_back({&request, request.num_computed_tokens, count});
  plan.num_tokens += count;
  request.last_scheduled_step = step_;
}

void Scheduler::commit(const StepPlan& plan) {
  for (const auto& [request, start, count] : plan.chunks) {
    TV_CHECK(request->state == RequestState::kRunning && request->num_computed_tokens == start, name_of(*request),
             " has changed since it was scheduled");
    request->num_computed_tokens = start + count;
    register_blocks(*request);
  }
}

void Scheduler::register_blocks(Request& request) {
  const int64_t known = request.num_tokens() - (request.last_token_is_known() ? 0 : 1);
  const int64_t begin = request.num_registered_tokens, end = std::min(request.num_computed_tokens, known);
  if (end <= begin) return;
  allocator_.register_blocks(request.block_table, request.tokens, request.cache_salt, begin, end);
  request.num_registered_tokens = end;
}

void Scheduler::bring_forward(std::vector<Request*>& requests, int64_t count) {
  if (count >= static_cast<int64_t>(requests.size())) return;
  std::stable_sort(requests.begin(), requests.end(), [](const Request* a, const Request* b) {
    return std::pair(a->priority, a->last_scheduled_step) < std::pair(b->priority, b->last_scheduled_step);
  });
  std::sort(requests.begin(), requests.begin() + count, goes_before);
}

int64_t Scheduler::num_sequences(const std::vector<Request*>& requests) {
  int64_t sum = 0;
  for (const Request* request : requests) sum += num_sequences(*request);
  return sum;
}

void Scheduler::check_invariants() const {
  allocator_.check_invariants();
  std::vector<int64_t> owners(static_cast<size_t>(allocator_.num_blocks()), 0);
  for (const Request* r : running_) {
    TV_CHECK(r->state == RequestState::kRunning, name_of(*r), " is in the running queue");
    TV_CHECK(allocator_.blocks_for(r->num_computed_tokens) <= static_cast<int64_t>(r->block_table.size()), name_of(*r),
             " has computed ", r->num_computed_tokens, " tokens in ", r->block_table.size(), " blocks");
    for (int32_t b : r->block_table) ++owners[static_cast<size_t>(b)];
  }
  for (const Request* r : waiting_) {
    TV_CHECK(r->state == RequestState::kWaiting, name_of(*r), " is in the waiting queue");
    TV_CHECK(r->block_table.empty() && r->num_computed_tokens == 0, name_of(*r), " waits with blocks");
  }
  for (int32_t b = 0; b < allocator_.num_blocks(); ++b) {
    TV_CHECK(owners[static_cast<size_t>(b)] == allocator_.ref_count(b), "block ", b, " is in ",
             owners[static_cast<size_t>(b)], " tables and has ", allocator_.ref_count(b), " owners");
  }
  TV_CHECK(num_sequences(running_) <= config_.max_num_seqs, num_sequences(running_), " sequences run");
  TV_CHECK(std::is_sorted(running_.begin(), running_.end(), goes_before) &&
               std::is_sorted(waiting_.begin(), waiting_.end(), goes_before),
           "a queue is out of order");
}

std::unique_ptr<Scheduler> make_scheduler(const std::string& policy, const SchedulerConfig& config,
                                          BlockAllocator& allocator) {
  if (policy == "continuous") return make_continuous_batching(config, allocator);
  if (policy == "static") return make_static_batching(config, allocator);
  throw InvalidRequestError(str("scheduler is \"", policy, "\"; it must be \"continuous\" or \"static\""));
}

}  // namespace tiny_vllm
