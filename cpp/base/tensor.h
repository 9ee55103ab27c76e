// A view of memory that somebody else owns: where, of what, and in which shape. Row-major, without gaps.
//
// Letters that shapes are written in, here and everywhere:
//   T tokens in the step · R requests in the step · D hidden size · H query heads · Hk KV heads · Dh head dim
//   F feed-forward width · V vocabulary · L layers · BS block size (tokens) · NB blocks · B blocks in a block table row
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "base/dtype.h"
#include "base/error.h"

namespace tiny_vllm {

struct Tensor {
  static constexpr int kMaxDims = 5;

  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int ndim = 0;
  std::array<int64_t, kMaxDims> shape{};

  Tensor() = default;
  Tensor(void* memory, DType element, std::initializer_list<int64_t> dims) : data(memory), dtype(element) {
    for (int64_t d : dims) {
      TV_CHECK(ndim < kMaxDims && d >= 0, "a tensor has at most ", kMaxDims, " dimensions, none negative");
      shape[ndim++] = d;
    }
  }

  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= shape[i];
    return n;
  }
  int64_t nbytes() const { return numel() * size_of(dtype); }
  bool defined() const { return data != nullptr; }

  template <typename T>
  T* as() const {
    TV_CHECK(dtype == dtype_of<T>(), "tensor is ", name_of(dtype), ", read as ", name_of(dtype_of<T>()));
    return static_cast<T*>(data);
  }

  // Rows [begin, begin + count) of the first dimension.
  Tensor rows(int64_t begin, int64_t count) const {
    TV_CHECK(ndim >= 1 && begin >= 0 && count >= 0 && begin + count <= shape[0], "rows ", begin, "+", count, " of ",
             shape_string());
    Tensor t = *this;
    const int64_t row_bytes = shape[0] == 0 ? 0 : nbytes() / shape[0];
    t.data = static_cast<char*>(data) + begin * row_bytes;
    t.shape[0] = count;
    return t;
  }

  std::string shape_string() const {
    std::string s = "(";
    for (int i = 0; i < ndim; ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
    return s + ")";
  }
};

}  // namespace tiny_vllm
