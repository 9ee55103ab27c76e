// What both backends ask of the steps and tensors that they are given.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <iterator>

#include "backend/step_batch.h"
#include "base/error.h"
#include "base/tensor.h"

namespace tiny_vllm {

// Binds the dimensions of an op: check_shape("x", x, {T, D}) complains with the name and both shapes.
inline void check_shape(const char* name, const Tensor& t, std::initializer_list<int64_t> expected) {
  TV_CHECK(t.defined() || t.numel() == 0, name, " has no data");
  TV_CHECK(t.ndim == static_cast<int>(expected.size()) && std::equal(expected.begin(), expected.end(), t.shape.begin()),
           name, " has shape ", t.shape_string(), ", expected ", Tensor(nullptr, t.dtype, expected).shape_string());
}

inline void check_dtype(const char* name, const Tensor& t, DType dtype) {
  TV_CHECK(t.dtype == dtype, name, " is ", name_of(t.dtype), ", expected ", name_of(dtype));
}

// The arrays of a step have the sizes that its tokens and requests ask for.
inline void check_batch(const StepBatch& batch) {
  const int64_t tokens = batch.num_tokens(), requests = batch.num_requests(), rows = std::ssize(batch.logits_rows);
  const auto check = [](const char* name, size_t size, int64_t expected) {
    TV_CHECK(static_cast<int64_t>(size) == expected, "StepBatch.", name, " has ", size, " entries, expected ",
             expected);
  };
  check("positions", batch.positions.size(), tokens);
  check("slot_mapping", batch.slot_mapping.size(), tokens);
  check("query_start", batch.query_start.size(), requests + 1);
  check("block_tables", batch.block_tables.size(), requests * batch.block_table_width);
  if (!batch.sampling.empty()) check("sampling", batch.sampling.size(), rows);
  if (!batch.token_counts_start.empty()) check("token_counts_start", batch.token_counts_start.size(), rows + 1);
  if (!batch.token_biases_start.empty()) check("token_biases_start", batch.token_biases_start.size(), rows + 1);
  TV_CHECK(batch.query_start.front() == 0 && batch.query_start.back() == tokens &&
               std::is_sorted(batch.query_start.begin(), batch.query_start.end()),
           "StepBatch.query_start must rise from 0 to ", tokens);
}

// Calls fn with a value of the tensor's element type.
template <typename Fn>
void for_dtype(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kBFloat16:
      return fn(bfloat16{});
    case DType::kFloat32:
      return fn(float{});
    case DType::kFloat16:
      break;
  }
  TV_CHECK(false, "the backends compute in bfloat16 or float32, not in ", name_of(dtype));
}

}  // namespace tiny_vllm
