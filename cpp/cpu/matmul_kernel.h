// x (M, K) x weight (N, K)ᵀ: every output is the dot product of a row of x and a row of weight.
//
// The order in which the products of one output are added is fixed: one accumulator of 16 lanes walks through K, then
// the lanes are added by the tree of reduce_add(). Tiles only decide which outputs are computed side by
// side. So a row's result has the same bits whatever else is in the batch.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace tiny_vllm::TINY_VLLM_ISA {
namespace {

// acc[c][r] = lanes of dot(rows[r], x[c]).
template <typename T, int kRows, int kCols>
inline void dot_tile(const T* const* rows, const T* const* x, int64_t k, Vec (&acc)[kCols][kRows]) {
  using D = Dot<T>;
  for (int c = 0; c < kCols; ++c) {
    for (int r = 0; r < kRows; ++r) acc[c][r] = zero();
  }
  int64_t i = 0;
  for (; i + D::kStep <= k; i += D::kStep) {
    typename D::Operand w[kRows];
    for (int r = 0; r < kRows; ++r) w[r] = D::load_operand(rows[r] + i);
    for (int c = 0; c < kCols; ++c) {
      const typename D::Operand a = D::load_operand(x[c] + i);
      for (int r = 0; r < kRows; ++r) acc[c][r] = D::step(acc[c][r], w[r], a);
    }
  }
  if (i < k) {
    for (int c = 0; c < kCols; ++c) {
      const typename D::Operand a = D::load_operand(x[c] + i, k - i);
      for (int r = 0; r < kRows; ++r) acc[c][r] = D::step(acc[c][r], D::load_operand(rows[r] + i, k - i), a);
    }
  }
}

template <typename T>
inline void finish_columns(const MatmulArgs<T>& args, int64_t row, int64_t n, int64_t count, Vec sums) {
  if (args.bias) sums = sums + load(args.bias + n, count);
  const int64_t at = row * args.n + n;
  T* out = static_cast<T*>(args.out) + at;
  if (args.out_is_float) {
    store(static_cast<float*>(args.out) + at, sums, count);
  } else if (args.add) {
    T rounded[16];
    store(rounded, sums, count);
    store(out, load(out, count) + load(rounded, count), count);
  } else {
    store(out, sums, count);
  }
}

// Columns [n, n + count) with count <= 16, of kCols rows from `row` on.
template <typename T, int kCols>
inline void matmul_tile(const MatmulArgs<T>& args, int64_t row, int64_t n, int64_t count) {
  const T* x[kCols];
  for (int c = 0; c < kCols; ++c) x[c] = args.x + (row + c) * args.k;

  // Past the last column the last weight row is read again, and its results are not stored.
  constexpr int kRows = kCols == 1 ? 1 : kTileRows;
  Vec lanes[kCols][16];
  for (int64_t r = 0; r < 16; r += kRows) {
    const T* rows[kRows];
    for (int j = 0; j < kRows; ++j) {
      const int64_t last = count - 1;
      rows[j] = args.weight + (n + (r + j < last ? r + j : last)) * args.k;
    }
    Vec acc[kCols][kRows];
    dot_tile<T, kRows, kCols>(rows, x, args.k, acc);
    for (int c = 0; c < kCols; ++c) {
      for (int j = 0; j < kRows; ++j) lanes[c][r + j] = acc[c][j];
    }
  }
  for (int c = 0; c < kCols; ++c) finish_columns(args, row + c, n, count, reduce_add(lanes[c]));
}

// Rows [m, m_end) of the same columns: kCols at a time, and what is left over with smaller tiles.
template <typename T, int kCols>
inline void matmul_rows(const MatmulArgs<T>& args, int64_t m, int64_t m_end, int64_t n, int64_t count) {
  for (; m + kCols <= m_end; m += kCols) matmul_tile<T, kCols>(args, m, n, count);
  if constexpr (kCols > 1) {
    if (m < m_end) matmul_rows<T, kCols - 1>(args, m, m_end, n, count);
  }
}

template <typename T>
void matmul(const MatmulArgs<T>& args, int64_t n_begin, int64_t n_end) {
  constexpr int64_t kRowBlock = 128;  // rows of x that stay in the L2 cache while the weights pass by
  for (int64_t m = 0; m < args.m; m += kRowBlock) {
    const int64_t m_end = m + kRowBlock < args.m ? m + kRowBlock : args.m;
    for (int64_t n = n_begin; n < n_end; n += 16) {
      matmul_rows<T, kTileCols>(args, m, m_end, n, n_end - n < 16 ? n_end - n : 16);
    }
  }
}

}  // namespace
}  // namespace tiny_vllm::TINY_VLLM_ISA
