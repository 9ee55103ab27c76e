// What a step is made of: the tokens that go through the model, and how the next ones are chosen.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tiny_vllm {

// How a row of logits becomes a token: the fields that Sampler (cpp/sample) reads.
struct SampleRow {
  double temperature = 1;
  int64_t top_k = 0;
  double top_p = 1;
  double min_p = 0;
  uint64_t seed = 0;
  int64_t position = 0;
  double repetition_penalty = 1;
  double presence_penalty = 0;
  double frequency_penalty = 0;
  bool last_is_output = false;  // the row's last token was generated, and does not come from the prompt
  int32_t allowed = -1;         // which of the step's sets of allowed tokens counts; -1: all tokens are allowed
  int32_t num_logprobs = -1;    // most likely tokens to report beside the chosen one; -1: none, nor the chosen one

  bool has_penalties() const { return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0; }
};

// What is added to a token's logit; -infinity bans it.
struct TokenBias {
  int32_t token = 0;
  float bias = 0;
};

// How often a row's request has a token: `count` times in its output, 0 when in its prompt only.
struct TokenCount {
  int32_t token = 0;
  int32_t count = 0;
};

// TokenLogprob (cpp/sample) as a device writes it.
struct DeviceLogprob {
  int32_t token = -1;
  float logprob = 0;
  int32_t rank = 0;
};

// What a device chose for the rows of a step.
struct Sampled {
  std::span<const int32_t> tokens;          // (n), -1: no answer
  std::span<const DeviceLogprob> logprobs;  // (n, 1 + max_logprobs()): the chosen one, then the most likely; or empty
};

// The tokens of one step, flat: request r owns rows [query_start[r], query_start[r + 1]) and no row is padding.
// A row may be a decode, part of a prefill chunk, or the recomputation of a preempted request: all are the same thing.
struct StepBatch {
  std::vector<int32_t> token_ids;     // (T)    ~i (negative): the token sampled for row i of the step before
  std::vector<int32_t> positions;     // (T)    position of the token in its request
  std::vector<int64_t> slot_mapping;  // (T)    where its key and value go: block * BS + offset
  std::vector<int32_t> query_start;   // (R+1)  first row of each request, then T
  std::vector<int32_t> context_len;   // (R)    keys that the request's last row sees, this step's included
  std::vector<int32_t> block_tables;  // (R, B) blocks of each request in order; the tail of a row is unused
  int64_t block_table_width = 0;      // B
  std::vector<float> cos_sin;         // (T, Dh/2, 2) rotary angles of each row: cos, sin
  std::vector<int32_t> logits_rows;   // (n)    rows whose logits are wanted

  // For a device that chooses the tokens. With `sampling` empty the host does it.
  std::vector<SampleRow> sampling;          // (n)
  std::vector<TokenCount> token_counts;     // of the rows with penalties: the tokens before the row's own, each once
  std::vector<int32_t> token_counts_start;  // (n+1) first entry of each row, then the end; empty: no row has any
  std::vector<TokenBias> token_biases;      // of the rows with biases
  std::vector<int32_t> token_biases_start;  // (n+1) the same for these
  std::vector<uint32_t> allowed;            // (k, ceil(V / 32)) a bit for each token, the lowest first

  int64_t num_tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t num_requests() const { return static_cast<int64_t>(context_len.size()); }
};

// The same arrays, on the device. Valid until the next upload(). A device may have added rows of padding at the end,
// each a request of one token without context (context_len 0, slot -1): ops compute something for them and write no
// cache.
struct DeviceBatch {
  int64_t num_tokens = 0;
  int64_t num_requests = 0;
  int64_t num_logits_rows = 0;
  int64_t block_table_width = 0;
  const int32_t* token_ids = nullptr;
  const int32_t* positions = nullptr;
  const int64_t* slot_mapping = nullptr;
  const int32_t* query_start = nullptr;
  const int32_t* context_len = nullptr;
  const int32_t* block_tables = nullptr;
  const float* cos_sin = nullptr;
  const int32_t* logits_rows = nullptr;
  const SampleRow* sampling = nullptr;
  const TokenCount* token_counts = nullptr;
  const int32_t* token_counts_start = nullptr;
  const TokenBias* token_biases = nullptr;
  const int32_t* token_biases_start = nullptr;
  const uint32_t* allowed = nullptr;
  const StepBatch* host = nullptr;  // for grid sizes and work lists
};

}  // namespace tiny_vllm
