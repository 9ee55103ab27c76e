// Attention on the tile unit: both of its products, as 16 x 32 x 16 tiles of bfloat16.
//
//   scores: C (16 keys, w rows)     += A (16 keys, 32 of Dh)     x B (32 of Dh, w rows)     w = min(rows, 16)
//   output: C (w rows, 16 of Dh)    += A (w rows, 32 keys)       x B (32 keys, 16 of Dh)
//
// Keys are tiles of A as they lie in the cache. Queries are packed once, as B; values, tile by tile, as B. In between
// the scores are transposed, so that the softmax of a row is the one of online_softmax.h.
//
// The weights of the softmax are floats and the tile unit takes bfloat16, which would cost them 16 of their 24 bits.
// Each weight is therefore split in two, high + low, which together hold 16 bits, and both go through the tiles.
#pragma once

#include "cpu/amx_matmul.h"
#include "cpu/attention_kernel.h"

namespace tiny_vllm::TINY_VLLM_ISA {
namespace {

// Tile registers: 0, 1 scores, 2 keys, 3 queries; 4, 5 output, 6 weights, 7 values.
inline TileConfig attention_tiles(int64_t width) {
  TileConfig config(16);
  for (int t : {0, 1, 3}) config.row_bytes[t] = static_cast<uint16_t>(4 * width);
  for (int t : {4, 5, 6}) config.rows[t] = static_cast<uint8_t>(width);
  return config;
}

template <typename T>
class AmxAttention {
  static_assert(sizeof(T) == sizeof(bfloat16));

 public:
  AmxAttention(const AttentionRows<T>& rows, float* scratch)
      : rows_(rows),
        dim_(rows.args.shape.head_dim),
        width_(min_of(rows.count(), 16)),
        groups_((rows.count() + 15) / 16),
        steps_((dim_ + kTileK - 1) / kTileK),
        scope_(attention_tiles(width_)) {
    scores_ = scratch;
    high_ = reinterpret_cast<bfloat16*>(scores_ + kQueryRows * kKeyTile);
    low_ = high_ + kQueryRows * kKeyTile;
    values_ = low_ + kQueryRows * kKeyTile;
    keys_ = values_ + kKeyTile * padded_head_dim(dim_);
    queries_ = keys_ + kKeyTile * steps_ * kTileK;
    pack_queries();
  }

  // Keys [begin, begin + kKeyTile), into the state of each row.
  void attend(int64_t begin, OnlineSoftmax* states) {
    const KeyRange read = rows_.visible_to_any(begin, begin + kKeyTile);
    if (read.begin >= read.end) return;
    pack_values(begin, read);
    for (int64_t g = 0; g < groups_; ++g) {
      score_group(begin, read, g);
      weigh_group(begin, g, states);
      add_values(g, states);
    }
  }

 private:
  // Rows of the item -> group, step (Dh / 32), pair (16), row (w), 2.
  void pack_queries() {
    for (int64_t g = 0; g < groups_; ++g) {
      for (int64_t step = 0; step < steps_; ++step) {
        Vec words[16];
        for (int64_t i = 0; i < 16; ++i) {
          const int64_t row = min_of(g * 16 + i, rows_.count() - 1);
          words[i] = load_words(rows_.query(row) + step * kTileK, dim_ - step * kTileK);
        }
        transpose_16x16(words);
        bfloat16* tile = queries_ + (g * steps_ + step) * kTileK * width_;
        for (int64_t pair = 0; pair < 16; ++pair) {
          store(reinterpret_cast<float*>(tile + pair * 2 * width_), words[pair], width_);
        }
      }
    }
  }

  // Values of the tile -> step (32 keys), part (16 of Dh), pair of keys (16), element (16), 2. Slots that no row sees
  // count as zeros, whatever they hold.
  void pack_values(int64_t begin, KeyRange read) {
    const int64_t parts = padded_head_dim(dim_) / 16;
    for (int64_t pair = 0; pair < kKeyTile / 2; ++pair) {
      const bfloat16* value[2];
      for (int i = 0; i < 2; ++i) {
        const int64_t key = begin + 2 * pair + i;
        value[i] = key >= read.begin && key < read.end ? rows_.args.values + rows_.offset(key) : nullptr;
      }
      for (int64_t part = 0; part < parts; ++part) {
        const auto bits = [&](const bfloat16* v) {
          return v ? _mm512_castps_si512(load(v + part * 16, min_of(16, dim_ - part * 16)).v) : _mm512_setzero_si512();
        };
        const __m512i words = _mm512_or_si512(_mm512_srli_epi32(bits(value[0]), 16), bits(value[1]));
        _mm512_storeu_si512(values_ + (((pair / 16) * parts + part) * 16 + pair % 16) * 32, words);
      }
    }
  }

  // The rows of tile A: sixteen keys from `key` on, and the distance between them.
  struct KeyRows {
    const bfloat16* first;
    int64_t stride;
  };

  // Where the keys do not lie side by side in one block, or the head does not fill whole tiles, they are copied.
  KeyRows key_rows(int64_t key, KeyRange read) {
    const AttentionShape& s = rows_.args.shape;
    if (s.block_size % 16 == 0 && dim_ % kTileK == 0) return {rows_.args.keys + rows_.offset(key), dim_};
    const int64_t stride = steps_ * kTileK;
    bfloat16* copy = keys_ + key % kKeyTile * stride;
    for (int64_t j = 0; j < 16; ++j) {
      const bfloat16* row = rows_.args.keys + rows_.offset(min_of(max_of(key + j, read.begin), read.end - 1));
      for (int64_t i = 0; i < stride; i += kTileK) {
        store(reinterpret_cast<float*>(copy + j * stride + i), load_words(row + i, dim_ - i));
      }
    }
    return {copy, stride};
  }

  // scores_[row][key] of the group's rows. Where no row sees any of sixteen keys, others are read in their place:
  // their scores are masked afterwards.
  void score_group(int64_t begin, KeyRange read, int64_t g) {
    const int64_t first = read.begin / 16 * 16, last = (read.end - 1) / 16 * 16;
    const bfloat16* queries = queries_ + g * steps_ * kTileK * width_;
    alignas(64) float c[2][16 * 16];
    for (int64_t j = 0; j < kKeyTile; j += 32) {
      const KeyRows a = key_rows(min_of(max_of(begin + j, first), last), read);
      const KeyRows b = key_rows(min_of(max_of(begin + j + 16, first), last), read);
      finish_writes();
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t step = 0; step < steps_; ++step) {
        _tile_loadd(3, queries + step * kTileK * width_, 4 * width_);
        _tile_loadd(2, a.first + step * kTileK, 2 * a.stride);
        _tile_dpbf16ps(0, 2, 3);
        _tile_loadd(2, b.first + step * kTileK, 2 * b.stride);
        _tile_dpbf16ps(1, 2, 3);
      }
      _tile_stored(0, c[0], 4 * width_);
      _tile_stored(1, c[1], 4 * width_);
      for (int64_t half = 0; half < 2; ++half) {
        Vec lanes[16];
        for (int64_t i = 0; i < 16; ++i) lanes[i] = load(c[half] + i * width_, width_);
        transpose_16x16(lanes);
        for (int64_t r = 0; r < width_; ++r) {
          store(scores_ + r * kKeyTile + j + 16 * half, lanes[r] * set1(rows_.args.shape.scale));
        }
      }
    }
  }

  // Scores -> weights, split into high_ and low_; what was summed so far shrinks to the new maximum.
  void weigh_group(int64_t begin, int64_t g, OnlineSoftmax* states) {
    for (int64_t r = 0; r < width_; ++r) {
      const int64_t row = g * 16 + r;
      float* scores = scores_ + r * kKeyTile;
      if (row >= rows_.count()) {
        for (int64_t j = 0; j < kKeyTile; j += 16) store(scores + j, zero());
      } else {
        rows_.mask(row, begin, scores);
        const float factor = states[row].update(scores, kKeyTile);
        if (factor != 1) {
          float* out = states[row].out;
          for (int64_t i = 0; i < dim_; i += 16) store(out + i, load(out + i) * set1(factor));
        }
      }
      for (int64_t j = 0; j < kKeyTile; j += 16) {
        const Vec weight = load(scores + j);
        store(high_ + r * kKeyTile + j, weight);
        store(low_ + r * kKeyTile + j, weight - load(high_ + r * kKeyTile + j));
      }
    }
  }

  // out += weights x values. Rows of `out` lie padded_head_dim() apart, as attention() laid them out.
  void add_values(int64_t g, OnlineSoftmax* states) {
    const int64_t parts = padded_head_dim(dim_) / 16, out_bytes = 4 * padded_head_dim(dim_);
    finish_writes();
    for (int64_t part = 0; part < parts; part += 2) {
      float* out = states[g * 16].out + part * 16;
      _tile_loadd(4, out, out_bytes);
      if (part + 1 < parts) _tile_loadd(5, out + 16, out_bytes);
      for (int64_t step = 0; step < kKeyTile / kTileK; ++step) {
        const bfloat16* values = values_ + (step * parts + part) * 16 * 32;
        for (const bfloat16* weights : {high_, low_}) {
          _tile_loadd(6, weights + step * kTileK, 2 * kKeyTile);
          _tile_loadd(7, values, 64);
          _tile_dpbf16ps(4, 6, 7);
          if (part + 1 < parts) {
            _tile_loadd(7, values + 16 * 32, 64);
            _tile_dpbf16ps(5, 6, 7);
          }
        }
      }
      _tile_stored(4, out, out_bytes);
      if (part + 1 < parts) _tile_stored(5, out + 16, out_bytes);
    }
  }

  const AttentionRows<T>& rows_;
  const int64_t dim_, width_, groups_, steps_;
  const TileScope scope_;
  float* scores_;      // (w, kKeyTile)
  bfloat16* high_;     // (w, kKeyTile)
  bfloat16* low_;      // (w, kKeyTile)
  bfloat16* values_;   // see pack_values
  bfloat16* keys_;     // (kKeyTile, steps * 32), when keys must be copied
  bfloat16* queries_;  // see pack_queries
};

}  // namespace
}  // namespace tiny_vllm::TINY_VLLM_ISA
