// What attention has to do, for the profile. Unlike the other kernels' it depends on the step's numbers, not only on
// its shape.
#pragma once

#include <algorithm>

#include "kernels/kernels.h"

namespace tiny_vllm {

enum class Queries { kOne, kSeveral, kAll };  // the requests that a kernel does: with one query token, with more, all

// Bytes: queries and results, (T, H·Dh) each, and for each request the keys and values that its queries see, once.
// Operations: 4 · H · Dh for each pair of a query token and a key that it sees.
template <typename T>
KernelWork attention_work(const Stream& stream, const char* name, const AttentionArgs<T>& args, Queries queries) {
  if (!stream.timer || !args.host) return name;
  const AttentionShape& s = args.shape;
  const StepBatch& batch = *args.host;
  int64_t tokens = 0, keys = 0, pairs = 0;
  for (int64_t r = 0; r < batch.num_requests(); ++r) {
    const int64_t count = batch.query_start[r + 1] - batch.query_start[r], context = batch.context_len[r];
    if (queries != Queries::kAll && (count == 1) != (queries == Queries::kOne)) continue;
    const int64_t window = s.sliding_window > 0 ? s.sliding_window : context;
    tokens += count;
    keys += std::min(context, window + count - 1);
    for (int64_t position = context - count; position < context; ++position) pairs += std::min(position + 1, window);
  }
  return {name, (2 * tokens * s.num_heads + 2 * keys * s.num_kv_heads) * s.head_dim * int64_t{sizeof(T)},
          4 * pairs * s.num_heads * s.head_dim};
}

}  // namespace tiny_vllm
