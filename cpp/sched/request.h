// One sequence of tokens on its way through the engine.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sample/sampling_params.h"
#include "sample/token_counts.h"

namespace tiny_vllm {

enum class RequestState : uint8_t { kWaiting, kRunning, kFinished };
enum class FinishReason : uint8_t { kNone, kStop, kLength, kAbort, kError };

// With params.n > 1 a request becomes n sequences once its prompt is computed: the first keeps the object, the others
// are copies with their own `index` that share its blocks until they write to them.
struct Request : std::enable_shared_from_this<Request> {
  std::string id;
  int64_t index = 0;     // which of the n outputs
  int64_t priority = 0;  // the smaller number goes first,
  uint64_t arrival = 0;  // and among equals who came first
  SamplingParams params;

  std::vector<int32_t> tokens;         // the prompt, then what was generated
  int64_t row_of_last_token = kKnown;  // when only the device knows it yet: the row of the step that samples it
  int64_t num_prompt_tokens = 0;
  int64_t max_total_tokens = 0;       // the prompt and the most that may follow it
  int64_t num_computed_tokens = 0;    // keys and values of tokens [0, this) are in the cache
  int64_t num_registered_tokens = 0;  // of these, offered to the prefix cache
  int64_t num_cached_tokens = -1;     // of the prompt, found in the prefix cache; -1: not admitted yet
  std::vector<int32_t> block_table;
  bool read_prefix_cache = true;  // false when logits of every prompt token are wanted
  uint64_t cache_salt = 0;        // sequences with different salts never share blocks

  RequestState state = RequestState::kWaiting;
  FinishReason finish_reason = FinishReason::kNone;
  int64_t num_preemptions = 0;
  uint64_t last_scheduled_step = 0;  // of the scheduler; who has waited longest goes first when not all can
  uint64_t seed = 0;                 // of this sequence's random numbers
  std::vector<uint32_t> allowed;     // tokens that may come next, a bit each, (ceil(V / 32)); empty: all
  int64_t guided_at = kNotGuided;    // when its caller says them anew for each token: num_tokens() they are for
  TokenCounts counts;                // of the first tokens, where penalties need them
  int32_t event_id = -1;             // its number in the engine's EventLog, if there is one

  // Makes `counts` those of tokens [0, end).
  void count_tokens(int64_t end) {
    for (int64_t i = counts.num_counted(); i < end; ++i) counts.add(tokens[i], i >= num_prompt_tokens);
  }

  static constexpr int64_t kKnown = -1, kNotGuided = -1;
  bool is_guided() const { return guided_at != kNotGuided; }
  // Whether the choice of a token depends on which one the last was, and not only on how many there are.
  bool needs_last_token() const { return is_guided() || params.needs_last_token(); }
  bool last_token_is_known() const { return row_of_last_token == kKnown; }
  int64_t num_tokens() const { return static_cast<int64_t>(tokens.size()); }
  int64_t num_output_tokens() const { return num_tokens() - num_prompt_tokens; }
  // Tokens whose keys and values are still missing. A decode has one, a prefill has more; none are missing while a
  // step is under way that samples the last token the request may have.
  int64_t num_uncomputed_tokens() const { return num_tokens() - num_computed_tokens; }
};

}  // namespace tiny_vllm
