#include "engine/engine.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <span>
#include <utility>

#include "model/safetensors.h"
#include "sample/logit_edits.h"

namespace tiny_vllm {
namespace {

constexpr int64_t kMaxLogitsRows = 256;  // rows of logits held at a time: 256 x 128,256 x 4 bytes = 131 MB

// Positions that the model was made for. Linear, dynamic and yarn scaling stretch them by `factor`; llama3 checkpoints
// state the stretched length themselves.
int64_t supported_positions(const ModelConfig& c) {
  const RopeConfig& rope = c.rope;
  const auto stretched = [&](int64_t n) { return static_cast<int64_t>(static_cast<double>(n) * rope.factor); };
  switch (rope.type) {
    case RopeType::kLinear:
    case RopeType::kDynamic:
      return stretched(c.max_position_embeddings);
    case RopeType::kYarn:
      return std::max(c.max_position_embeddings, stretched(rope.original_max_position));
    case RopeType::kDefault:
    case RopeType::kLlama3:
      return c.max_position_embeddings;
  }
  return c.max_position_embeddings;
}

// Rows of a step and blocks of the cache have 32-bit numbers. The largest block is only there to keep products of
// sizes far from overflow.
constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
constexpr int64_t kLargestBlock = 65536;

void require_range(const char* field, int64_t value, int64_t most) {
  if (value < 1 || value > most) throw InvalidRequestError(str(field, " must be in [1, ", most, "], got ", value));
}

bool contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

// splitmix64: spreads consecutive numbers over all 64 bits.
uint64_t spread(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

Engine::Engine(const std::string& config_json, const std::string& source, const std::string& folder,
               EngineOptions options, std::unique_ptr<Backend> backend, const LoadProgress& progress)
    : options_(std::move(options)), backend_(std::move(backend)) {
  const BackendDefaults defaults = backend_->defaults();
  if (options_.max_num_seqs == 0) options_.max_num_seqs = defaults.max_num_seqs;
  if (options_.max_num_batched_tokens == 0) options_.max_num_batched_tokens = defaults.max_num_batched_tokens;
  const double utilization = options_.memory_utilization.value_or(defaults.memory_utilization);
  require_range("block_size", options_.block_size, kLargestBlock);
  require_range("max_num_seqs", options_.max_num_seqs, kMostRows);
  require_range("max_num_batched_tokens", options_.max_num_batched_tokens, kMostRows);
  if (!(utilization > 0 && utilization <= 1))
    throw InvalidRequestError(str("gpu_memory_utilization must be in (0, 1], got ", utilization));
  if (options_.kv_cache_memory_bytes < 0)
    throw InvalidRequestError(str("kv_cache_memory_bytes must not be negative, got ", options_.kv_cache_memory_bytes));

  if (options_.scheduling_policy != "fcfs" && options_.scheduling_policy != "priority")
    throw InvalidRequestError(
        str("scheduling_policy must be fcfs or priority, got '", options_.scheduling_policy, "'"));

  ModelConfig config = parse_config(config_json, source);
  const int64_t supported = supported_positions(config);
  if (options_.max_model_len == 0) options_.max_model_len = supported;
  require_range("max_model_len", options_.max_model_len, kMostRows);
  if (options_.max_model_len > supported && config.rope.type != RopeType::kDynamic)
    throw InvalidRequestError(
        str("max_model_len is ", options_.max_model_len, ", but ", source, " supports ", supported, " positions"));

  Weights weights = options_.dummy_weights
                        ? dummy_weights(config, options_.dtype, options_.seed, *backend_, progress)
                        : load_weights(config, Checkpoint::open(folder), options_.dtype, *backend_, progress);

  max_logits_rows_ = std::min({kMaxLogitsRows, options_.max_num_batched_tokens, options_.max_num_seqs});
  const TransformerLimits limits{options_.max_num_batched_tokens, max_logits_rows_, options_.block_size};
  transformer_ =
      std::make_unique<Transformer>(std::move(config), std::move(weights), options_.dtype, limits, *backend_);

  const int64_t num_blocks = choose_num_blocks(utilization);
  transformer_->allocate_kv_cache(num_blocks);
  allocator_ = std::make_unique<BlockAllocator>(num_blocks, options_.block_size, options_.enable_prefix_caching);
  SchedulerConfig scheduling;
  scheduling.max_num_seqs = options_.max_num_seqs;
  scheduling.max_num_batched_tokens = options_.max_num_batched_tokens;
  scheduling.max_model_len = options_.max_model_len;
  scheduling.enable_chunked_prefill = options_.enable_chunked_prefill;
  scheduler_ = make_scheduler(options_.scheduler, scheduling, *allocator_);
  if (options_.record_events) {
    log_ = std::make_unique<EventLog>();
    allocator_->note_evicted();
  }
}

Engine::~Engine() = default;

// As many blocks as the argument or the free memory pays for, but never more than the largest load can fill.
int64_t Engine::choose_num_blocks(double utilization) const {
  const int64_t block_bytes = transformer_->kv_bytes_per_block();
  if (options_.kv_cache_memory_bytes > 0) {
    const int64_t blocks = options_.kv_cache_memory_bytes / block_bytes;
    if (blocks < 1)
      throw OutOfMemoryError(str("kv_cache_memory_bytes is ", options_.kv_cache_memory_bytes, ", but one block of ",
                                 options_.block_size, " tokens takes ", block_bytes, " bytes; raise it"));
    return blocks;
  }
  const MemoryInfo memory = backend_->memory();
  const auto budget = static_cast<int64_t>(static_cast<double>(memory.available_bytes) * utilization);
  const int64_t blocks_per_sequence = (options_.max_model_len + options_.block_size - 1) / options_.block_size;
  // Divided, not multiplied: both numbers come from the caller and their product may not fit 64 bits.
  const int64_t affordable = budget / block_bytes;
  if (affordable < 1)
    throw OutOfMemoryError(str("no memory left for the KV cache: ", memory.available_bytes, " of ", memory.total_bytes,
                               " bytes are free after loading the model, one block takes ", block_bytes,
                               "; raise gpu_memory_utilization or lower max_num_batched_tokens"));
  if (blocks_per_sequence > affordable / options_.max_num_seqs) return affordable;
  return blocks_per_sequence * options_.max_num_seqs;
}

void Engine::add_request(const std::string& id, std::vector<int32_t> prompt, const SamplingParams& params,
                         int64_t priority, std::vector<uint32_t> allowed) {
  const ModelConfig& config = transformer_->config();
  if (requests_.count(id) != 0)
    throw InvalidRequestError(str("request_id '", id, "' is in use by an unfinished request"));
  if (prompt.empty()) throw InvalidRequestError("prompt has no tokens; at least one is needed");
  for (int32_t token : prompt)
    if (token < 0 || token >= config.vocab_size)
      throw InvalidRequestError(
          str("prompt token id ", token, " is outside the vocabulary [0, ", config.vocab_size - 1, "]"));
  params.validate(config.vocab_size);
  if (priority != 0 && options_.scheduling_policy != "priority")
    throw InvalidRequestError(str("priority is ", priority,
                                  ", but scheduling_policy is fcfs; make the engine with "
                                  "scheduling_policy=\"priority\""));

  auto request = std::make_shared<Request>();
  request->id = id;
  request->priority = priority;
  request->arrival = next_arrival_;
  request->params = params;
  request->num_prompt_tokens = static_cast<int64_t>(prompt.size());
  // The scheduler lowers this to what fits; here it only must not overflow.
  const int64_t room = std::max<int64_t>(0, scheduler_->max_total_len() - request->num_prompt_tokens);
  request->max_total_tokens = request->num_prompt_tokens + std::min(params.max_tokens.value_or(room), room);
  request->tokens = std::move(prompt);
  if (!allowed.empty()) {
    guide(*request, std::move(allowed));
  } else if (!params.allowed_token_ids.empty()) {
    request->allowed = allowed_bits(params, config.vocab_size);
  }
  request->read_prefix_cache = !params.prompt_logprobs.has_value();
  // Dynamic RoPE turns keys by an angle that depends on the prompt's length: only equal lengths may share blocks.
  if (transformer_->rope().depends_on_length())
    request->cache_salt =
        static_cast<uint64_t>(std::max(request->num_prompt_tokens, config.rope.original_max_position));
  request->seed = params.seed ? static_cast<uint64_t>(*params.seed) : spread(options_.seed ^ spread(next_arrival_));

  scheduler_->add(request.get());
  if (log_) log_->arrived(*request);
  ++next_arrival_;
  Group group;
  group.num_unfinished = params.n;
  group.sequences.push_back(std::move(request));
  requests_.emplace(id, std::move(group));
}

bool Engine::abort_request(const std::string& id) {
  const auto it = requests_.find(id);
  if (it == requests_.end()) return false;
  for (const auto& request : it->second.sequences) {
    if (request->state == RequestState::kFinished) continue;
    end_sequence(*request, FinishReason::kAbort);
  }
  requests_.erase(it);
  ++metrics_.num_aborted;
  return true;
}

// From now on the tokens that may come next are these, as far as allowed_token_ids has them too.
void Engine::guide(Request& request, std::vector<uint32_t> allowed) const {
  const int64_t vocab_size = transformer_->config().vocab_size;
  TV_CHECK(std::ssize(allowed) == (vocab_size + 31) / 32, "a set of allowed tokens has ", allowed.size(),
           " words of 32 bits, for a vocabulary of ", vocab_size);
  if (!request.params.allowed_token_ids.empty()) {
    const std::vector<uint32_t> bits = allowed_bits(request.params, vocab_size);
    std::ranges::transform(allowed, bits, allowed.begin(), std::bit_and<>());
  }
  request.allowed = std::move(allowed);
  request.guided_at = request.num_tokens();
}

bool Engine::allow_tokens(const std::string& id, int64_t index, int64_t num_output_tokens,
                          std::vector<uint32_t> allowed) {
  const auto it = requests_.find(id);
  if (it == requests_.end() || index < 0 || index >= std::ssize(it->second.sequences)) return false;
  Request& request = *it->second.sequences[index];
  TV_CHECK(request.is_guided(), "request ", id, "[", index, "] is not guided");
  if (request.state == RequestState::kFinished || request.num_output_tokens() != num_output_tokens) return false;
  guide(request, std::move(allowed));
  return true;
}

bool Engine::stop_sequence(const std::string& id, int64_t index, FinishReason reason) {
  const auto it = requests_.find(id);
  if (it == requests_.end() || index < 0 || index >= std::ssize(it->second.sequences)) return false;
  Request& request = *it->second.sequences[index];
  if (request.state == RequestState::kFinished) return false;
  finish(request, reason);
  if (it->second.num_unfinished == 0) requests_.erase(it);
  return true;
}

std::vector<StepOutput> Engine::step() {
  std::vector<StepOutput> outputs;
  std::erase_if(flights_, [](const Flight& flight) {
    return std::ranges::all_of(flight.requests, [](const auto& r) { return r->state == RequestState::kFinished; });
  });
  const int64_t most = backend_->can_sample() && !options_.backend.enforce_eager ? 2 : 1;
  while (std::ssize(flights_) < most && (flights_.empty() || flights_.back().sampled) && start(outputs)) {
  }
  if (!flights_.empty()) {
    const Flight flight = std::move(flights_.front());
    flights_.pop_front();
    take(flight, outputs);
  }
  std::erase_if(requests_, [](const auto& entry) { return entry.second.num_unfinished == 0; });
  return outputs;
}

// False when there was nothing to start, or when it failed.
bool Engine::start(std::vector<StepOutput>& outputs) {
  Stopwatch watch;
  const double start = log_ ? steady_seconds() : 0;
  if (!flights_.empty()) expect_tokens(flights_.back());
  const StepPlan plan = scheduler_->schedule();
  metrics_.num_preemptions += static_cast<int64_t>(plan.preempted.size());
  for (const Request* request : plan.admitted)
    if (request->num_preemptions == 0) metrics_.num_prompt_tokens += request->num_prompt_tokens;
  Flight flight;
  if (log_) flight.events = log_->scheduled(*scheduler_, plan, allocator_->take_evicted(), start);
  if (plan.chunks.empty()) return false;

  for (const ScheduledChunk& chunk : plan.chunks) flight.requests.push_back(chunk.request->shared_from_this());
  ++metrics_.num_steps;
  try {
    launch(plan, flight, watch);
  } catch (const std::exception& error) {
    give_up(flight, error.what(), outputs);
    if (log_) log_->ended(flight.events);
    return false;
  }
  flights_.push_back(std::move(flight));
  return true;
}

// Each row of the flight will bring a token, unless it is the request's last one. For the plan that comes next it does
// not matter which. Where it matters for the token after it, the request sits the next step out.
void Engine::expect_tokens(const Flight& flight) {
  for (int64_t i = 0; i < std::ssize(flight.rows); ++i) {
    Request& request = *flight.rows[i].request;
    if (request.state == RequestState::kFinished || request.num_tokens() + 1 >= request.max_total_tokens) continue;
    if (request.needs_last_token()) continue;
    request.tokens.push_back(-1);
    request.row_of_last_token = i;
  }
}

void Engine::launch(const StepPlan& plan, Flight& flight, Stopwatch& watch) {
  for (const BlockCopy& copy : plan.copies) transformer_->copy_block(copy.src, copy.dst);
  StepBatch batch = make_batch(plan, flight.rows);
  require_guidance(flight.rows);
  flight.sampled = device_can_sample(flight.rows);
  if (flight.sampled) add_sampling(flight.rows, batch);
  metrics_.schedule_seconds += watch.lap();
  if (log_) log_->forward_started(flight.events);

  flight.ticket = transformer_->forward(batch);
  scheduler_->commit(plan);
  metrics_.num_computed_tokens += plan.num_tokens;
  metrics_.bytes_read += transformer_->bytes_read_per_step();
  for (int32_t context_len : batch.context_len)
    metrics_.bytes_read += context_len * transformer_->config().kv_bytes_per_token(options_.dtype);
  metrics_.forward_seconds += watch.lap();
}

// Waits for the end of the step, and gives each of its requests what it brought.
void Engine::take(const Flight& flight, std::vector<StepOutput>& outputs) {
  Stopwatch watch;
  events_ = flight.events;
  try {
    const Sampled sampled = backend_->receive(flight.ticket);
    metrics_.forward_seconds += watch.lap();
    if (log_) log_->forward_ended(flight.events);
    if (flight.sampled) {
      take_tokens(flight, sampled, outputs);
    } else {
      take_logits(flight, watch, outputs);
    }
    metrics_.sample_seconds += watch.lap();
  } catch (const std::exception& error) {
    give_up(flight, error.what(), outputs);
  }
  if (log_) log_->ended(flight.events);
}

// What the device chose.
void Engine::take_tokens(const Flight& flight, const Sampled& sampled, std::vector<StepOutput>& outputs) {
  const int64_t vocab_size = transformer_->config().vocab_size, width = 1 + backend_->max_logprobs();
  for (int64_t i = 0; i < std::ssize(flight.rows); ++i) {
    Request& request = *flight.rows[i].request;
    if (request.state == RequestState::kFinished) continue;
    std::vector<TokenLogprob> logprobs;
    if (request.params.logprobs)
      for (const DeviceLogprob& entry :
           sampled.logprobs.subspan(i * width, 1 + std::min(*request.params.logprobs, vocab_size)))
        logprobs.push_back({entry.token, entry.logprob, entry.rank});
    append_token(request, sampled.tokens[i], std::move(logprobs), outputs);
  }
}

// The host looks at the logits itself, at as many rows at a time as there is room for.
void Engine::take_logits(const Flight& flight, Stopwatch& watch, std::vector<StepOutput>& outputs) {
  const int64_t count = std::ssize(flight.rows), vocab_size = transformer_->config().vocab_size;
  for (int64_t begin = 0; begin < count; begin += max_logits_rows_) {
    const int64_t rows = std::min(max_logits_rows_, count - begin);
    logits_.resize(rows * vocab_size);
    transformer_->logits(begin, rows, logits_.data());
    metrics_.forward_seconds += watch.lap();
    if (log_) log_->forward_ended(flight.events);
    for (int64_t i = 0; i < rows; ++i)
      take_row(flight.rows[begin + i], std::span(logits_).subspan(i * vocab_size, vocab_size), outputs);
    metrics_.sample_seconds += watch.lap();
  }
}

// The blocks of these requests may hold anything now, so none of them can go on. All others can.
void Engine::give_up(const Flight& flight, const char* error, std::vector<StepOutput>& outputs) {
  for (const std::shared_ptr<Request>& request : flight.requests) {
    if (request->state == RequestState::kFinished) continue;
    Group& group = requests_.at(request->id);
    for (int64_t i = 0; i < request->params.n; ++i) {
      Request* sequence = i < std::ssize(group.sequences) ? group.sequences[i].get() : nullptr;  // null: not yet forked
      if (group.num_unfinished == 0 || (sequence && sequence->state == RequestState::kFinished)) continue;
      StepOutput out;
      out.request_id = request->id;
      out.index = i;
      out.finish_reason = FinishReason::kError;
      out.error = str("the forward pass failed: ", error);
      outputs.push_back(std::move(out));
      if (sequence) end_sequence(*sequence, FinishReason::kError);
      ++metrics_.num_finished;
      --group.num_unfinished;
    }
  }
}

// Lays the plan's chunks end to end, and lists the rows whose logits are wanted.
StepBatch Engine::make_batch(const StepPlan& plan, std::vector<LogitsRow>& rows) const {
  StepBatch batch;
  const int64_t BS = options_.block_size, Dh = transformer_->config().head_dim;
  for (const ScheduledChunk& chunk : plan.chunks)
    batch.block_table_width =
        std::max(batch.block_table_width, static_cast<int64_t>(chunk.request->block_table.size()));
  batch.query_start.push_back(0);
  batch.cos_sin.resize(plan.num_tokens * Dh);

  for (const ScheduledChunk& chunk : plan.chunks) {
    const Request& r = *chunk.request;
    for (int64_t p = chunk.start; p < chunk.start + chunk.count; ++p) {
      const int64_t row = batch.num_tokens();
      transformer_->rope().cos_sin(static_cast<int32_t>(p), std::max(r.num_prompt_tokens, p + 1),
                                   batch.cos_sin.data() + row * Dh);
      const bool is_known = p + 1 < r.num_tokens() || r.last_token_is_known();
      batch.token_ids.push_back(is_known ? r.tokens[p] : ~static_cast<int32_t>(r.row_of_last_token));
      batch.positions.push_back(static_cast<int32_t>(p));
      batch.slot_mapping.push_back(r.block_table[p / BS] * BS + p % BS);

      const bool last_known = p + 1 == r.num_tokens();
      const bool prompt_logprob = r.params.prompt_logprobs && r.num_output_tokens() == 0 &&
                                  p + 1 < r.num_prompt_tokens &&
                                  p >= static_cast<int64_t>(requests_.at(r.id).prompt_logprobs.size());
      if (last_known || prompt_logprob) {
        batch.logits_rows.push_back(static_cast<int32_t>(row));
        rows.push_back({chunk.request, p});
      }
    }
    batch.query_start.push_back(static_cast<int32_t>(batch.num_tokens()));
    batch.context_len.push_back(static_cast<int32_t>(chunk.start + chunk.count));
    batch.block_tables.insert(batch.block_tables.end(), r.block_table.begin(), r.block_table.end());
    batch.block_tables.resize(batch.context_len.size() * batch.block_table_width, 0);
  }
  return batch;
}

// Nobody's token is chosen from the set that was allowed for another one.
void Engine::require_guidance(const std::vector<LogitsRow>& rows) const {
  for (const auto& [request, position] : rows)
    if (request->is_guided() && position + 1 >= request->num_prompt_tokens)
      TV_CHECK(request->guided_at == position + 1, "request ", request->id, "[", request->index,
               "] was not told what may come as token ", position + 1);
}

// Only tokens are wanted, and at most as many log probabilities as the device reports; each row is one sequence's.
bool Engine::device_can_sample(const std::vector<LogitsRow>& rows) const {
  return backend_->can_sample() && std::ranges::all_of(rows, [&](const LogitsRow& row) {
           const Request& r = *row.request;
           return row.position + 1 >= r.num_prompt_tokens &&
                  r.params.logprobs.value_or(0) <= backend_->max_logprobs() &&
                  (r.params.n == 1 || requests_.at(r.id).forked);
         });
}

void Engine::add_sampling(const std::vector<LogitsRow>& rows, StepBatch& batch) const {
  for (const auto& [request, position] : rows) {
    const SamplingParams& params = request->params;
    SampleRow row;
    row.temperature = params.temperature;
    row.top_k = params.top_k;
    row.top_p = params.top_p;
    row.min_p = params.min_p;
    row.seed = request->seed;
    row.position = position + 1;
    row.repetition_penalty = params.repetition_penalty;
    row.presence_penalty = params.presence_penalty;
    row.frequency_penalty = params.frequency_penalty;
    row.last_is_output = position >= request->num_prompt_tokens;
    if (params.logprobs) row.num_logprobs = static_cast<int32_t>(*params.logprobs);
    if (!request->allowed.empty()) {
      row.allowed = static_cast<int32_t>(batch.allowed.size() / request->allowed.size());
      batch.allowed.insert(batch.allowed.end(), request->allowed.begin(), request->allowed.end());
    }
    batch.sampling.push_back(row);

    const std::span<const int32_t> tokens(request->tokens.data(), position + 1);
    const std::vector<TokenBias> biases =
        token_biases(params, tokens.subspan(request->num_prompt_tokens), options_.eos_token_ids);
    batch.token_biases_start.push_back(static_cast<int32_t>(batch.token_biases.size()));
    batch.token_biases.insert(batch.token_biases.end(), biases.begin(), biases.end());
  }
  batch.token_biases_start.push_back(static_cast<int32_t>(batch.token_biases.size()));
  if (batch.token_biases.empty()) batch.token_biases_start.clear();
  if (std::ranges::none_of(batch.sampling, &SampleRow::has_penalties)) return;
  for (const auto& [request, position] : rows) {
    batch.token_counts_start.push_back(static_cast<int32_t>(batch.token_counts.size()));
    if (!request->params.has_penalties()) continue;
    request->count_tokens(position);
    const std::vector<TokenCount>& counts = request->counts.all();
    batch.token_counts.insert(batch.token_counts.end(), counts.begin(), counts.end());
  }
  batch.token_counts_start.push_back(static_cast<int32_t>(batch.token_counts.size()));
}

void Engine::take_row(const LogitsRow& row, std::span<const float> logits, std::vector<StepOutput>& outputs) {
  Request& request = *row.request;
  if (request.state == RequestState::kFinished) return;
  Group& group = requests_.at(request.id);
  if (row.position + 1 < request.num_prompt_tokens) {
    const int32_t next = request.tokens[row.position + 1];
    group.prompt_logprobs.push_back(sampler_.logprobs(logits, next, *request.params.prompt_logprobs));
    return;
  }
  if (!group.forked) {
    group.forked = true;
    fork(request);  // before anybody appends a token: all n start from the same prompt
    for (size_t i = 1; i < group.sequences.size(); ++i) sample(*group.sequences[i], logits, outputs);
  }
  sample(request, logits, outputs);
}

void Engine::sample(Request& request, std::span<const float> logits, std::vector<StepOutput>& outputs) {
  const std::span<const int32_t> tokens = request.tokens;
  const SampleContext context{tokens.first(request.num_prompt_tokens), tokens.subspan(request.num_prompt_tokens),
                              options_.eos_token_ids, request.allowed};
  const int32_t token = sampler_.sample(logits, request.params, {request.seed, request.num_tokens()}, context);
  std::vector<TokenLogprob> logprobs;
  if (token >= 0 && request.params.logprobs) logprobs = sampler_.logprobs(logits, token, *request.params.logprobs);
  append_token(request, token, std::move(logprobs), outputs);
}

void Engine::fork(Request& parent) {
  Group& group = requests_.at(parent.id);
  for (int64_t i = 1; i < parent.params.n; ++i) {
    auto child = std::make_shared<Request>(parent);
    child->index = i;
    child->seed = parent.seed + static_cast<uint64_t>(i);
    scheduler_->fork(&parent, child.get());
    if (log_) log_->arrived(*child, &parent);
    group.sequences.push_back(std::move(child));
  }
}

void Engine::append_token(Request& request, int32_t token, std::vector<TokenLogprob> logprobs,
                          std::vector<StepOutput>& outputs) {
  if (!request.last_token_is_known()) {  // now it is
    request.tokens.pop_back();
    request.row_of_last_token = Request::kKnown;
  }
  StepOutput out;
  out.request_id = request.id;
  out.index = request.index;
  out.num_cached_tokens = request.num_cached_tokens;
  if (request.index == 0 && request.num_output_tokens() == 0)
    out.prompt_logprobs = std::move(requests_.at(request.id).prompt_logprobs);

  const SamplingParams& params = request.params;
  if (token < 0) {
    out.finish_reason = FinishReason::kError;
    out.error = str("no token can be chosen after token ", request.num_tokens(),
                    ": the model's logits are not numbers (NaN or infinity)",
                    request.params.bans_tokens() || request.is_guided() ? ", or no token is allowed" : "");
  } else {
    request.tokens.push_back(token);
    scheduler_->register_blocks(request);  // its keys and values may be computed already
    ++metrics_.num_generated_tokens;
    out.token = token;
    out.logprobs = std::move(logprobs);
    if (!params.ignore_eos && contains(options_.eos_token_ids, token)) {
      out.finish_reason = FinishReason::kStop;
    } else if (contains(params.stop_token_ids, token)) {
      out.finish_reason = FinishReason::kStop;
      out.stop_token = token;
    } else if (request.num_tokens() >= request.max_total_tokens) {
      out.finish_reason = FinishReason::kLength;
    }
  }
  if (log_ && token >= 0) log_->sampled(events_, request, token, out.finish_reason);
  if (out.finish_reason != FinishReason::kNone) finish(request, out.finish_reason);
  outputs.push_back(std::move(out));
}

void Engine::finish(Request& request, FinishReason reason) {
  end_sequence(request, reason);
  ++metrics_.num_finished;
  --requests_.at(request.id).num_unfinished;
}

void Engine::end_sequence(Request& request, FinishReason reason) {
  scheduler_->remove(&request);
  request.finish_reason = reason;
  if (log_) log_->finished(request, reason);
}

const EventLog* Engine::events() {
  if (log_) log_->flush(*scheduler_);
  return log_.get();
}

}  // namespace tiny_vllm
