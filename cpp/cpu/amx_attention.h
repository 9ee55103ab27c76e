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
    values_ = reinterpret_cast<bfloat16*>(scores_ + kQueryRows * kKeyTile);
    copy_ = values_ + kKeyTile * padded_head_dim(dim_);
    queries_ = copy_ + kKeyTile * steps_ * kTileK;
    pack_queries();
  }

  // Keys [begin, begin + kKeyTile), into the state of each row.
  void attend(int64_t begin, OnlineSoftmax* states) {
    const KeyRange read = rows_.visible_to_any(begin, begin + kKeyTile);
    if (read.begin >= read.end) return;
    rows_.find_tile(begin, read, offsets_);
    const bool finite = pack_values(begin, read);
    find_keys();
    // One kind of work after the other for all rows: a tile that is loaded right after its rows were stored waits for
    // them, and what must be done in sequence for one row overlaps with the same for the next.
    for (int64_t g = 0; g < groups_; ++g) score_group(g);
    float factors[kQueryRows];
    for (int64_t row = 0; row < rows_.count(); ++row) {
      rows_.mask(row, begin, scores_ + row * kKeyTile);
      factors[row] = states[row].raise_max(scores_ + row * kKeyTile, kKeyTile);
    }
    for (int64_t row = 0; row < rows_.count(); ++row) {
      states[row].weigh(scores_ + row * kKeyTile, kKeyTile);
      split_weights(scores_ + row * kKeyTile);
      float* out = states[row].out;
      for (int64_t i = 0; i < dim_; i += 16) store(out + i, load(out + i) * set1(factors[row]));
    }
    if (finite) {
      for (int64_t g = 0; g < groups_; ++g) add_values(g, states[g * 16].out);
    } else {
      add_values_row_by_row(begin, states);
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

  // Values of the tile -> step (32 keys), part (16 of Dh), pair of keys (16), element (16), 2. Slots outside
  // `read` count as zeros, whatever they hold. Returns whether all others are finite.
  bool pack_values(int64_t begin, KeyRange read) {
    const int64_t parts = padded_head_dim(dim_) / 16;
    const __m512i exponent = _mm512_set1_epi16(0x7f80);  // all ones: infinity or NaN
    __mmask32 not_finite = 0;
    for (int64_t pair = 0; pair < kKeyTile / 2; ++pair) {
      const bfloat16* value[2];
      for (int i = 0; i < 2; ++i) {
        const int64_t j = 2 * pair + i;
        const bool seen = begin + j >= read.begin && begin + j < read.end;
        value[i] = seen ? rows_.args.values + offsets_[j] : nullptr;
      }
      for (int64_t part = 0; part < parts; ++part) {
        const auto bits = [&](const bfloat16* v) {
          if (!v) return _mm512_setzero_si512();
          const int64_t left = dim_ - part * 16;
          return _mm512_castps_si512((left >= 16 ? load(v + part * 16) : load(v + part * 16, left)).v);
        };
        const __m512i words = _mm512_or_si512(_mm512_srli_epi32(bits(value[0]), 16), bits(value[1]));
        not_finite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(words, exponent), exponent);
        _mm512_storeu_si512(values_ + (((pair / 16) * parts + part) * 16 + pair % 16) * 32, words);
      }
    }
    return not_finite == 0;
  }

  // Sixteen keys as the rows of a tile A. Where they do not lie side by side in one block, or the head does not fill
  // whole tiles, or some of them are not to be read, they are copied.
  void find_keys() {
    for (int64_t j = 0; j < kKeyTile; j += 16) {
      bool in_place = dim_ % kTileK == 0;
      for (int64_t i = 1; i < 16; ++i) in_place &= offsets_[j + i] == offsets_[j] + i * dim_;
      KeyRows& rows = keys_[j / 16];
      rows = {rows_.args.keys + offsets_[j], dim_};
      if (in_place) continue;
      rows = {copy_ + j * steps_ * kTileK, steps_ * kTileK};
      for (int64_t i = 0; i < 16; ++i) {
        for (int64_t step = 0; step < steps_; ++step) {
          const Vec words = load_words(rows_.args.keys + offsets_[j + i] + step * kTileK, dim_ - step * kTileK);
          store(reinterpret_cast<float*>(copy_ + (j + i) * steps_ * kTileK + step * kTileK), words);
        }
      }
    }
  }

  // scores_[row][key] of the group's rows.
  void score_group(int64_t g) {
    const bfloat16* queries = queries_ + g * steps_ * kTileK * width_;
    alignas(64) float c[2][16 * 16];
    finish_writes();
    for (int64_t j = 0; j < kKeyTile; j += 32) {
      const KeyRows a = keys_[j / 16], b = keys_[j / 16 + 1];
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
        float* scores = scores_ + g * 16 * kKeyTile + j + 16 * half;
        if (width_ <= 4) {
          const __m512i every_row =
              _mm512_mullo_epi32(_mm512_set1_epi32(static_cast<int>(width_)),
                                 _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
          for (int64_t r = 0; r < width_; ++r) {
            const Vec row = {_mm512_i32gather_ps(every_row, c[half] + r, 4)};
            store(scores + r * kKeyTile, row * set1(rows_.args.shape.scale));
          }
          continue;
        }
        Vec lanes[16];
        for (int64_t i = 0; i < 16; ++i) lanes[i] = load(c[half] + i * width_, width_);
        transpose_16x16(lanes);
        for (int64_t r = 0; r < width_; ++r) store(scores + r * kKeyTile, lanes[r] * set1(rows_.args.shape.scale));
      }
    }
  }

  // 64 floats -> their 64 high parts and their 64 low parts, in the same place.
  static void split_weights(float* scores) {
    __m512i high[2], low[2];
    for (int i = 0; i < 2; ++i) {
      const Vec a = load(scores + 32 * i), b = load(scores + 32 * i + 16);
      const __m512bh h = _mm512_cvtne2ps_pbh(b.v, a.v);
      const __m256i ha = _mm512_castsi512_si256((__m512i)h), hb = _mm512_extracti64x4_epi64((__m512i)h, 1);
      high[i] = (__m512i)h;
      low[i] = (__m512i)_mm512_cvtne2ps_pbh((b - widen(hb)).v, (a - widen(ha)).v);
    }
    for (int i = 0; i < 2; ++i) {
      _mm512_storeu_si512(scores + 16 * i, high[i]);
      _mm512_storeu_si512(scores + 32 + 16 * i, low[i]);
    }
  }

  // A weight of 0 times a value that is NaN would be NaN, also for a row that must not see that value. So for each row
  // the values that it does not see are packed as zeros. Same tiles, same order, same bits for the others.
  void add_values_row_by_row(int64_t begin, OnlineSoftmax* states) {
    const int64_t stride = padded_head_dim(dim_);
    float* group_out = reinterpret_cast<float*>(queries_ + groups_ * steps_ * kTileK * 16);
    for (int64_t row = 0; row < rows_.count(); ++row) {
      pack_values(begin, rows_.visible(row, begin, begin + kKeyTile));
      const int64_t at = row % 16 * stride;
      for (int64_t i = 0; i < stride; ++i) group_out[at + i] = states[row].out[i];
      add_values(row / 16, group_out);
      for (int64_t i = 0; i < stride; ++i) states[row].out[i] = group_out[at + i];
    }
  }

  // out += weights x values. Rows of `out` lie padded_head_dim() apart.
  void add_values(int64_t g, float* group_out) {
    const int64_t parts = padded_head_dim(dim_) / 16, out_bytes = 4 * padded_head_dim(dim_);
    finish_writes();
    for (int64_t part = 0; part < parts; part += 2) {
      float* out = group_out + part * 16;
      _tile_loadd(4, out, out_bytes);
      if (part + 1 < parts) _tile_loadd(5, out + 16, out_bytes);
      for (int64_t step = 0; step < kKeyTile / kTileK; ++step) {
        const bfloat16* values = values_ + (step * parts + part) * 16 * 32;
        for (int64_t low = 0; low < 2; ++low) {
          const float* weights = scores_ + g * 16 * kKeyTile + low * 32 + step * 16;
          _tile_loadd(6, weights, 4 * kKeyTile);
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

  struct KeyRows {
    const bfloat16* first;
    int64_t stride;
  };

  const AttentionRows<T>& rows_;
  const int64_t dim_, width_, groups_, steps_;
  const TileScope scope_;
  int64_t offsets_[kKeyTile];  // of the tile's keys, see find_tile
  KeyRows keys_[kKeyTile / 16];
  float* scores_;      // (rows, kKeyTile), then in its place the weights: (rows, 2, kKeyTile) of bfloat16, high and low
  bfloat16* values_;   // see pack_values
  bfloat16* copy_;     // (kKeyTile, steps * 32), for keys that must be copied
  bfloat16* queries_;  // see pack_queries
};

}  // namespace
}  // namespace tiny_vllm::TINY_VLLM_ISA
