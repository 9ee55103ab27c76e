#include "engine/engine.h"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "model/safetensors.h"

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

void Engine::add_request(const std::string& id, std::vector<int32_t> prompt, const SamplingParams& params) {
  const ModelConfig& config = transformer_->config();
  if (requests_.count(id) != 0)
    throw InvalidRequestError(str("request_id '", id, "' is in use by an unfinished request"));
  if (prompt.empty()) throw InvalidRequestError("prompt has no tokens; at least one is needed");
  for (int32_t token : prompt)
    if (token < 0 || token >= config.vocab_size)
      throw InvalidRequestError(
          str("prompt token id ", token, " is outside the vocabulary [0, ", config.vocab_size - 1, "]"));
  params.validate(config.vocab_size);

  auto request = std::make_unique<Request>();
  request->id = id;
  request->arrival = next_arrival_;
  request->params = params;
  request->num_prompt_tokens = static_cast<int64_t>(prompt.size());
  // The scheduler lowers this to what fits; here it only must not overflow.
  const int64_t room = std::max<int64_t>(0, scheduler_->max_total_len() - request->num_prompt_tokens);
  request->max_total_tokens = request->num_prompt_tokens + std::min(params.max_tokens.value_or(room), room);
  request->tokens = std::move(prompt);
  request->read_prefix_cache = !params.prompt_logprobs.has_value();
  // Dynamic RoPE turns keys by an angle that depends on the prompt's length: only equal lengths may share blocks.
  if (transformer_->rope().depends_on_length())
    request->cache_salt =
        static_cast<uint64_t>(std::max(request->num_prompt_tokens, config.rope.original_max_position));
  request->seed = params.seed ? static_cast<uint64_t>(*params.seed) : spread(options_.seed ^ spread(next_arrival_));

  scheduler_->add(request.get());
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
    scheduler_->remove(request.get());
    request->finish_reason = FinishReason::kAbort;
  }
  requests_.erase(it);
  ++metrics_.num_aborted;
  return true;
}

std::vector<StepOutput> Engine::step() {
  Stopwatch watch;
  const StepPlan plan = scheduler_->schedule();
  metrics_.num_preemptions += static_cast<int64_t>(plan.preempted.size());
  for (const Request* request : plan.admitted)
    if (request->num_preemptions == 0) metrics_.num_prompt_tokens += request->num_prompt_tokens;
  std::vector<StepOutput> outputs;
  if (plan.chunks.empty()) return outputs;

  try {
    run(plan, watch, outputs);
  } catch (const std::exception& error) {
    give_up(plan, error.what(), outputs);
  }
  ++metrics_.num_steps;
  std::erase_if(requests_, [](const auto& entry) { return entry.second.num_unfinished == 0; });
  return outputs;
}

void Engine::run(const StepPlan& plan, Stopwatch& watch, std::vector<StepOutput>& outputs) {
  for (const BlockCopy& copy : plan.copies) transformer_->copy_block(copy.src, copy.dst);
  std::vector<LogitsRow> rows;
  const StepBatch batch = make_batch(plan, rows);
  metrics_.schedule_seconds += watch.lap();

  transformer_->forward(batch);
  if (rows.empty()) backend_->synchronize();  // else the wait for the tokens does
  scheduler_->commit(plan);
  metrics_.num_computed_tokens += plan.num_tokens;
  metrics_.bytes_read += transformer_->bytes_read_per_step();
  for (int32_t context_len : batch.context_len)
    metrics_.bytes_read += context_len * transformer_->config().kv_bytes_per_token(options_.dtype);
  metrics_.forward_seconds += watch.lap();

  for (int64_t begin = 0; begin < std::ssize(rows); begin += max_logits_rows_)
    take_rows(begin, std::span(rows).subspan(begin, std::min(max_logits_rows_, std::ssize(rows) - begin)), watch,
              outputs);
}

// Rows [begin, begin + rows.size()) of the step's logits, as many as are held at a time.
void Engine::take_rows(int64_t begin, std::span<const LogitsRow> rows, Stopwatch& watch,
                       std::vector<StepOutput>& outputs) {
  // Where only tokens are wanted, the device may choose them, and the logits stay where they are.
  std::vector<SampleRow> sampling;
  for (const LogitsRow& row : rows) {
    const Request& r = *row.request;
    const bool only_a_token =
        row.position + 1 >= r.num_prompt_tokens && !r.params.logprobs &&
                              !r.params.has_penalties() && (r.params.n == 1 || requests_.at(r.id).forked);
    if (!only_a_token) break;
    sampling.push_back({r.params.temperature, r.params.top_k, r.params.top_p, r.params.min_p, r.seed, r.num_tokens()});
  }
  std::vector<int32_t> tokens(rows.size());
  if (sampling.size() == rows.size() && transformer_->sample(begin, sampling, tokens.data())) {
    metrics_.forward_seconds += watch.lap();
    for (size_t i = 0; i < rows.size(); ++i) append_token(*rows[i].request, tokens[i], {}, outputs);
    metrics_.sample_seconds += watch.lap();
    return;
  }

  const int64_t vocab_size = transformer_->config().vocab_size, count = std::ssize(rows);
  logits_.resize(count * vocab_size);
  transformer_->logits(begin, count, logits_.data());
  metrics_.forward_seconds += watch.lap();
  for (int64_t i = 0; i < count; ++i)
    take_row(rows[i], std::span(logits_).subspan(i * vocab_size, vocab_size), outputs);
  metrics_.sample_seconds += watch.lap();
}

// The blocks of these requests may hold anything now, so none of them can go on. All others can.
void Engine::give_up(const StepPlan& plan, const char* error, std::vector<StepOutput>& outputs) {
  for (const ScheduledChunk& chunk : plan.chunks) {
    Group& group = requests_.at(chunk.request->id);
    for (int64_t i = 0; i < chunk.request->params.n; ++i) {
      Request* sequence = i < std::ssize(group.sequences) ? group.sequences[i].get() : nullptr;  // null: not yet forked
      if (group.num_unfinished == 0 || (sequence && sequence->state == RequestState::kFinished)) continue;
      StepOutput out;
      out.request_id = chunk.request->id;
      out.index = i;
      out.finish_reason = FinishReason::kError;
      out.error = str("the forward pass failed: ", error);
      outputs.push_back(std::move(out));
      if (sequence) scheduler_->remove(sequence);
      if (sequence) sequence->finish_reason = FinishReason::kError;
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
      batch.token_ids.push_back(r.tokens[p]);
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

void Engine::take_row(const LogitsRow& row, std::span<const float> logits, std::vector<StepOutput>& outputs) {
  Request& request = *row.request;
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
  const TokenHistory history{tokens.first(request.num_prompt_tokens), tokens.subspan(request.num_prompt_tokens)};
  const int32_t token = sampler_.sample(logits, request.params, {request.seed, request.num_tokens()}, history);
  append_token(request, token, logits, outputs);
}

void Engine::fork(Request& parent) {
  Group& group = requests_.at(parent.id);
  for (int64_t i = 1; i < parent.params.n; ++i) {
    auto child = std::make_unique<Request>(parent);
    child->index = i;
    child->seed = parent.seed + static_cast<uint64_t>(i);
    scheduler_->fork(&parent, child.get());
    group.sequences.push_back(std::move(child));
  }
}

// logits may be empty when no logprobs are wanted.
void Engine::append_token(Request& request, int32_t token, std::span<const float> logits,
                          std::vector<StepOutput>& outputs) {
  StepOutput out;
  out.request_id = request.id;
  out.index = request.index;
  out.num_cached_tokens = request.num_cached_tokens;
  if (request.index == 0 && request.num_output_tokens() == 0)
    out.prompt_logprobs = std::move(requests_.at(request.id).prompt_logprobs);

  const SamplingParams& params = request.params;
  if (token < 0) {
    out.finish_reason = FinishReason::kError;
    out.error = str("the model's logits are not numbers (NaN or infinity) after token ", request.num_tokens());
  } else {
    request.tokens.push_back(token);
    ++metrics_.num_generated_tokens;
    out.token = token;
    if (params.logprobs) out.logprobs = sampler_.logprobs(logits, token, *params.logprobs);
    if (!params.ignore_eos && contains(options_.eos_token_ids, token)) {
      out.finish_reason = FinishReason::kStop;
    } else if (contains(params.stop_token_ids, token)) {
      out.finish_reason = FinishReason::kStop;
      out.stop_token = token;
    } else if (request.num_tokens() >= request.max_total_tokens) {
      out.finish_reason = FinishReason::kLength;
    }
  }
  if (out.finish_reason != FinishReason::kNone) finish(request, out.finish_reason);
  outputs.push_back(std::move(out));
}

void Engine::finish(Request& request, FinishReason reason) {
  scheduler_->remove(&request);
  request.finish_reason = reason;
  ++metrics_.num_finished;
  --requests_.at(request.id).num_unfinished;
}

}  // namespace tiny_vllm
