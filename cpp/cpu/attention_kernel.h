// Causal attention over the paged KV cache: softmax(q·Kᵀ · scale)·V for each query row, as a stream over the keys.
//
// Keys are taken in tiles of 64 at fixed places of the request: 0-63, 64-127, ... wherever the block table put them.
// Neither the block size nor the other rows of the batch nor the chunk that a token was prefilled in moves a border, so
// none of them changes a bit of the result. Keys that a row must not see get score -inf and hence weight 0; slots past
// the end of the context, which may hold anything, are not read at all.
#pragma once

#include "cpu/kernels.h"
#include "cpu/matmul_kernel.h"
#include "cpu/online_softmax.h"

namespace tiny_vllm::TINY_VLLM_ISA {
namespace {

constexpr int64_t kKeyTile = 64;

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

struct KeyRange {
  int64_t begin, end;
};

// One item of work with its addresses worked out.
template <typename T>
struct AttentionRows {
  const AttentionArgs<T>& args;
  const AttentionItem& item;
  int64_t first_token = 0;     // row of qkv that holds the request's first token of this step
  int64_t first_position = 0;  // and its position in the request
  const int32_t* block_table = nullptr;
  int64_t tokens[kQueryRows];  // of each row: token of the request, counted from its first one in this step

  AttentionRows(const AttentionArgs<T>& a, const AttentionItem& i) : args(a), item(i) {
    first_token = args.query_start[item.request];
    first_position = args.context_len[item.request] - (args.query_start[item.request + 1] - first_token);
    for (int64_t row = 0; row < count(); ++row) tokens[row] = (item.row_begin + row) / args.group();
    block_table = args.block_tables + item.request * args.block_table_width;
  }

  int64_t count() const { return item.row_end - item.row_begin; }
  int64_t head(int64_t row) const { return item.kv_head * args.group() + (item.row_begin + row) % args.group(); }

  const T* query(int64_t row) const {
    const AttentionShape& s = args.shape;
    return args.qkv + ((first_token + tokens[row]) * (s.num_heads + 2 * s.num_kv_heads) + head(row)) * s.head_dim;
  }
  T* out(int64_t row) const {
    return args.out + ((first_token + tokens[row]) * args.shape.num_heads + head(row)) * args.shape.head_dim;
  }

  // The keys of [begin, end) that a row sees: itself and what came before, back to the sliding window's edge.
  KeyRange visible(int64_t row, int64_t begin, int64_t end) const {
    const int64_t position = first_position + tokens[row], window = args.shape.sliding_window;
    const int64_t oldest = window > 0 ? position - window + 1 : 0;
    const int64_t first = min_of(max_of(begin, oldest), end);
    return {first, max_of(first, min_of(end, position + 1))};
  }

  // What the rows of this item see together: row 0 looks back furthest, the last row ahead.
  KeyRange visible_to_any(int64_t begin, int64_t end) const {
    return {visible(0, begin, end).begin, visible(count() - 1, begin, end).end};
  }

  // Scores (kKeyTile) of keys that the row does not see become -inf. Returns what it sees, counted from `begin`.
  KeyRange mask(int64_t row, int64_t begin, float* scores) const {
    const KeyRange seen = visible(row, begin, begin + kKeyTile);
    for (int64_t j = 0; j < seen.begin - begin; ++j) scores[j] = -kInfinity;
    for (int64_t j = seen.end - begin; j < kKeyTile; ++j) scores[j] = -kInfinity;
    return {seen.begin - begin, seen.end - begin};
  }

  // Where the keys of a tile (and, in the other tensor, the values) lie. Only `read` is looked up in the block table;
  // the rest of the tile points at its nearest neighbour there.
  void find_tile(int64_t begin, KeyRange read, int64_t (&offsets)[kKeyTile]) const {
    const AttentionShape& s = args.shape;
    int64_t key = read.begin, block = key / s.block_size, in_block = key % s.block_size;
    while (key < read.end) {
      const int64_t head = block_table[block++] * s.num_kv_heads + item.kv_head;
      for (; in_block < s.block_size && key < read.end; ++in_block, ++key) {
        offsets[key - begin] = (head * s.block_size + in_block) * s.head_dim;
      }
      in_block = 0;
    }
    for (int64_t j = 0; j < read.begin - begin; ++j) offsets[j] = offsets[read.begin - begin];
    for (int64_t j = read.end - begin; j < kKeyTile; ++j) offsets[j] = offsets[read.end - begin - 1];
  }
};

// scores[j] = query · keys[j] * scale for a tile of 64 keys, 16 at a time.
template <typename T>
inline void score_tile(const T* query, const T* const* keys, int64_t dim, float scale, float* scores) {
  for (int64_t j = 0; j < kKeyTile; j += 16) {
    Vec acc[1][16];
    dot_tile<T, 16, 1>(keys + j, &query, dim, acc);
    store(scores + j, reduce_add(acc[0]) * set1(scale));
  }
}

// out[r] = out[r] * factor[r] + sum_j weights[r][j] * values[j], for elements [d, d + 16 kVecs) of kRows rows; the last
// vector of a value ends after n of them. Keys in `all` are seen by each of the rows. In the rest of `any` a row skips
// what it does not see: a weight of 0 times a value that is NaN would be NaN.
template <typename T, int kRows, int kVecs>
inline void value_tile(const T* const* values, const float* weights, const KeyRange* seen, KeyRange any, KeyRange all,
                       const float* factors, float* const* out, int64_t d, int64_t n) {
  Vec acc[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) acc[r][v] = load(out[r] + d + 16 * v) * set1(factors[r]);
  }
  const auto add_key = [&](int64_t j, bool for_all) {
    Vec value[kVecs];
    for (int v = 0; v < kVecs; ++v) value[v] = n == 16 ? load(values[j] + d + 16 * v) : load(values[j] + d, n);
    for (int r = 0; r < kRows; ++r) {
      if (!for_all && (j < seen[r].begin || j >= seen[r].end)) continue;
      const Vec weight = set1(weights[r * kKeyTile + j]);
      for (int v = 0; v < kVecs; ++v) acc[r][v] = fma(weight, value[v], acc[r][v]);
    }
  };
  int64_t j = any.begin;
  for (; j < all.begin; ++j) add_key(j, false);
  for (; j < all.end; ++j) add_key(j, true);
  for (; j < any.end; ++j) add_key(j, false);
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) store(out[r] + d + 16 * v, acc[r][v]);
  }
}

template <typename T, int kRows>
inline void value_rows(const T* const* values, const float* weights, const KeyRange* seen, const float* factors,
                       float* const* out, int64_t dim) {
  KeyRange any = seen[0], all = seen[0];
  for (int r = 1; r < kRows; ++r) {
    any = {min_of(any.begin, seen[r].begin), max_of(any.end, seen[r].end)};
    all = {max_of(all.begin, seen[r].begin), min_of(all.end, seen[r].end)};
  }
  all = {min_of(all.begin, any.end), max_of(all.end, min_of(all.begin, any.end))};  // rows with no key in common
  int64_t d = 0;
  for (; d + 64 <= dim; d += 64) value_tile<T, kRows, 4>(values, weights, seen, any, all, factors, out, d, 16);
  for (; d < dim; d += 16)
    value_tile<T, kRows, 1>(values, weights, seen, any, all, factors, out, d, min_of(16, dim - d));
}

// Attends to one tile of keys with vectors. (amx_attention.h does it with tiles.)
template <typename T>
class VectorAttention {
 public:
  VectorAttention(const AttentionRows<T>& rows, float* scratch) : rows_(rows), scores_(scratch) {}

  // Keys [begin, begin + kKeyTile), into the state of each row.
  void attend(int64_t begin, OnlineSoftmax* states) {
    const int64_t dim = rows_.args.shape.head_dim, count = rows_.count();

    // Only slots that some row sees are read. The scores of the rest of the tile become -inf.
    const KeyRange read = rows_.visible_to_any(begin, begin + kKeyTile);
    if (read.begin >= read.end) return;
    int64_t offsets[kKeyTile];
    rows_.find_tile(begin, read, offsets);
    const T* keys[kKeyTile];
    const T* values[kKeyTile];
    for (int64_t j = 0; j < kKeyTile; ++j) {
      keys[j] = rows_.args.keys + offsets[j];
      values[j] = rows_.args.values + offsets[j];
    }

    for (int64_t r = 0; r < count; r += 4) {
      const int64_t n = min_of(4, count - r);
      KeyRange seen[4];
      float factors[4];
      float* out[4];
      for (int64_t i = 0; i < n; ++i) {
        float* scores = scores_ + i * kKeyTile;
        score_tile(rows_.query(r + i), keys, dim, rows_.args.shape.scale, scores);
        seen[i] = rows_.mask(r + i, begin, scores);
        factors[i] = states[r + i].raise_max(scores, kKeyTile);
        states[r + i].weigh(scores, kKeyTile);
        out[i] = states[r + i].out;
      }
      if (n == 4) value_rows<T, 4>(values, scores_, seen, factors, out, dim);
      if (n == 3) value_rows<T, 3>(values, scores_, seen, factors, out, dim);
      if (n == 2) value_rows<T, 2>(values, scores_, seen, factors, out, dim);
      if (n == 1) value_rows<T, 1>(values, scores_, seen, factors, out, dim);
    }
  }

 private:
  const AttentionRows<T>& rows_;
  float* scores_;  // (4, kKeyTile)
};

template <typename T, template <typename> typename Attention>
void attention(const AttentionArgs<T>& args, const AttentionItem& item, float* scratch) {
  const AttentionRows<T> rows(args, item);
  const int64_t dim = args.shape.head_dim, stride = padded_head_dim(dim), count = rows.count();
  float* part_out = scratch;                          // (rows, stride)
  float* total_out = part_out + kQueryRows * stride;  // (rows, stride)
  Attention<T> tile(rows, total_out + kQueryRows * stride);

  OnlineSoftmax part[kQueryRows], total[kQueryRows];
  for (int64_t r = 0; r < count; ++r) total[r].init(total_out + r * stride, stride);

  for (int64_t split = item.split_begin; split < item.split_end; ++split) {
    for (int64_t r = 0; r < count; ++r) part[r].init(part_out + r * stride, stride);
    for (int64_t begin = split * kKeySplit; begin < (split + 1) * kKeySplit; begin += kKeyTile) {
      tile.attend(begin, part);
    }
    for (int64_t r = 0; r < count; ++r) total[r].merge(part[r].max, part[r].sum, part[r].out, stride);
  }

  for (int64_t r = 0; r < count; ++r) {
    if (!item.partial) {
      total[r].finish(rows.out(r), dim);
      continue;
    }
    float* partial = item.partial + r * partial_floats(dim);
    for (int64_t i = 0; i < stride; ++i) partial[i] = total[r].out[i];
    partial[stride] = total[r].max;
    partial[stride + 1] = total[r].sum;
  }
}

template <typename T>
void attention_merge(const AttentionArgs<T>& args, const AttentionItem& item, const float* partials, int64_t splits,
                     float* scratch) {
  const AttentionRows<T> rows(args, item);
  const int64_t dim = args.shape.head_dim, stride = padded_head_dim(dim), count = rows.count();
  for (int64_t r = 0; r < count; ++r) {
    OnlineSoftmax total;
    total.init(scratch, stride);
    for (int64_t split = 0; split < splits; ++split) {
      const float* partial = partials + (split * count + r) * partial_floats(dim);
      total.merge(partial[stride], partial[stride + 1], partial, stride);
    }
    total.finish(rows.out(r), dim);
  }
}

}  // namespace
}  // namespace tiny_vllm::TINY_VLLM_ISA
