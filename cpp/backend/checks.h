// What both backends ask of the tensors that their ops are given.
#pragma once

#include <algorithm>
#include <initializer_list>

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
