// Matmul on the tile unit (AMX) of recent Intel processors: one instruction multiplies a 16 x 32 tile of bfloat16 by a
// 32 x 16 one. Ten times the arithmetic of the vector units, so that prefill is no longer what one waits for.
//
//   C (16 weight rows, w tokens, float) += A (16 weight rows, 32 of K) x B (32 of K, w tokens)        w = min(M, 16)
//
// A is read straight from the row-major weights, which stay as they are on disk. B wants pairs of neighbours in K side
// by side, tokens next to each other: x is packed into that order first (pack_x). C comes out with the weight row as
// the first index, so it is transposed on its way to out.
//
// Every output is the sum over K in order, in steps of 32, whatever the shape of the batch: decode takes the same
// tiles as prefill, with fewer columns, and gets the same bits.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace tiny_vllm::TINY_VLLM_ISA {
namespace {

constexpr int64_t kTileM = 16, kTileK = 32;
constexpr int64_t kPanel = 2 * kTileM;  // weight rows that are worked on together

// What each of the eight tile registers holds: 0-3 are C, 4-5 A, 6-7 B.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  explicit TileConfig(int64_t tokens) {
    for (int t = 0; t < 8; ++t) {
      row_bytes[t] = static_cast<uint16_t>(t == 4 || t == 5 ? 2 * kTileK : 4 * tokens);
      rows[t] = kTileM;
    }
  }
};

// GCC's tile intrinsics do not tell the compiler what memory they read. Whatever was written for them must be in
// memory.
inline void finish_writes() { asm volatile("" ::: "memory"); }

// The tile registers are part of a thread's state; while they are in use the kernel must save 8 KiB of them.
struct TileScope {
  explicit TileScope(const TileConfig& config) {
    finish_writes();
    _tile_loadconfig(&config);
  }
  ~TileScope() { _tile_release(); }
};

// x (M, K) as B tiles: group (M / w), step (K / 32), pair (16), token (w), 2. Zeros where M or K end early.
struct PackedX {
  int64_t width, steps;

  PackedX(int64_t m, int64_t k) : width(m < 16 ? m : 16), steps((k + kTileK - 1) / kTileK) {}
  int64_t tile_size() const { return kTileK * width; }
  int64_t group_size() const { return steps * tile_size(); }
};

// Rows of 16 32-bit words -> columns.
inline void transpose_16x16(Vec (&rows)[16]) {
  Vec t[16];
  for (int i = 0; i < 16; i += 2) {  // pairs of rows: words 0,1 of each fourth, then 2,3
    t[i] = {_mm512_unpacklo_ps(rows[i].v, rows[i + 1].v)};
    t[i + 1] = {_mm512_unpackhi_ps(rows[i].v, rows[i + 1].v)};
  }
  for (int i = 0; i < 16; i += 4) {  // fours of rows: word j of each fourth, for j = 0..3
    const auto d = [&](int j) { return _mm512_castps_pd(t[i + j].v); };
    rows[i] = {_mm512_castpd_ps(_mm512_unpacklo_pd(d(0), d(2)))};
    rows[i + 1] = {_mm512_castpd_ps(_mm512_unpackhi_pd(d(0), d(2)))};
    rows[i + 2] = {_mm512_castpd_ps(_mm512_unpacklo_pd(d(1), d(3)))};
    rows[i + 3] = {_mm512_castpd_ps(_mm512_unpackhi_pd(d(1), d(3)))};
  }
  for (int j = 0; j < 4; ++j) {  // the fourths themselves are a 4 x 4 matrix to transpose
    const __m512 a = rows[j].v, b = rows[4 + j].v, c = rows[8 + j].v, d = rows[12 + j].v;
    const __m512 ab02 = _mm512_shuffle_f32x4(a, b, 0x88), ab13 = _mm512_shuffle_f32x4(a, b, 0xdd);
    const __m512 cd02 = _mm512_shuffle_f32x4(c, d, 0x88), cd13 = _mm512_shuffle_f32x4(c, d, 0xdd);
    t[j] = {_mm512_shuffle_f32x4(ab02, cd02, 0x88)};
    t[4 + j] = {_mm512_shuffle_f32x4(ab13, cd13, 0x88)};
    t[8 + j] = {_mm512_shuffle_f32x4(ab02, cd02, 0xdd)};
    t[12 + j] = {_mm512_shuffle_f32x4(ab13, cd13, 0xdd)};
  }
  for (int i = 0; i < 16; ++i) rows[i] = t[i];
}

// 32 bfloat16 of a row, as 16 words; zeros past n of them.
inline Vec load_words(const bfloat16* p, int64_t n) {
  const __mmask32 mask = n >= 32 ? 0xffffffffu : n <= 0 ? 0u : (1u << n) - 1u;
  return {_mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, p))};
}

inline int64_t packed_groups(int64_t m) { return (m + 15) / 16; }
int64_t packed_size(int64_t m, int64_t k) { return packed_groups(m) * PackedX(m, k).group_size(); }

void pack_x(const MatmulArgs<bfloat16>& args, bfloat16* packed, int64_t group_begin, int64_t group_end) {
  const PackedX p(args.m, args.k);
  for (int64_t group = group_begin; group < group_end; ++group) {
    const int64_t first = group * 16, rows = args.m - first < 16 ? args.m - first : 16;
    for (int64_t step = 0; step < p.steps; ++step) {
      bfloat16* tile = packed + group * p.group_size() + step * p.tile_size();
      Vec words[16];
      for (int64_t r = 0; r < 16; ++r) {
        const bfloat16* row = args.x + (first + (r < rows ? r : 0)) * args.k + step * kTileK;
        words[r] = load_words(row, r < rows ? args.k - step * kTileK : 0);
      }
      if (p.width == 1) {
        _mm512_storeu_ps(tile, words[0].v);
        continue;
      }
      transpose_16x16(words);
      const __mmask16 mask = first_lanes(p.width);
      for (int64_t pair = 0; pair < 16; ++pair) _mm512_mask_storeu_ps(tile + pair * 2 * p.width, mask, words[pair].v);
    }
  }
}

// Weight rows [n, n + count) with count <= kPanel.
struct Panel {
  const bfloat16* weight;  // row n
  int64_t count, k;

  bool whole_step(int64_t step) const { return count == kPanel && (step + 1) * kTileK <= k; }

  // Where N or K ends within a tile: the tile's rows of one step, with zeros for what is not there.
  void copy_step(int64_t step, bfloat16* to) const {
    for (int64_t r = 0; r < kPanel; ++r) {
      const int64_t row = r < count ? r : 0, n = r < count ? k - step * kTileK : 0;
      store(reinterpret_cast<float*>(to + r * kTileK), load_words(weight + row * k + step * kTileK, n));
    }
  }
};

// C = panel x kGroups groups of packed x.
template <int kGroups>
inline void multiply_panel(const Panel& panel, const bfloat16* x, const PackedX& p) {
  alignas(64) bfloat16 edge[kPanel * kTileK];
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kGroups == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < p.steps; ++step) {
    const bfloat16* weight = panel.weight + step * kTileK;
    int64_t stride = panel.k;
    if (!panel.whole_step(step)) {
      panel.copy_step(step, edge);
      finish_writes();
      weight = edge;
      stride = kTileK;
    }
    const bfloat16* x_tile = x + step * p.tile_size();
    _tile_loadd(6, x_tile, 4 * p.width);
    _tile_loadd(4, weight, 2 * stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, weight + kTileM * stride, 2 * stride);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (kGroups == 2) {
      _tile_loadd(7, x_tile + p.group_size(), 4 * p.width);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// C tiles (16 weight rows, w) of one group, in memory -> columns [n, n + count) of its rows of out.
inline void store_group(const MatmulArgs<bfloat16>& args, const float (&c)[2][16 * 16], int64_t width, int64_t row,
                        int64_t n, int64_t count) {
  for (int64_t half = 0; half < 2 && half * 16 < count; ++half) {
    const int64_t columns = count - half * 16 < 16 ? count - half * 16 : 16;
    if (width == 1) {
      finish_columns(args, row, n + half * 16, columns, load(c[half]));
      continue;
    }
    Vec lanes[16];
    for (int64_t r = 0; r < 16; ++r) lanes[r] = load(c[half] + r * width, width);
    transpose_16x16(lanes);
    for (int64_t t = 0; t < width && row + t < args.m; ++t) {
      finish_columns(args, row + t, n + half * 16, columns, lanes[t]);
    }
  }
}

template <int kGroups>
inline void multiply_and_store(const MatmulArgs<bfloat16>& args, const PackedX& p, const Panel& panel, int64_t n,
                               int64_t group) {
  multiply_panel<kGroups>(panel, args.packed_x + group * p.group_size(), p);
  alignas(64) float c[kGroups][2][16 * 16];
  _tile_stored(0, c[0][0], 4 * p.width);
  _tile_stored(1, c[0][1], 4 * p.width);
  if constexpr (kGroups == 2) {
    _tile_stored(2, c[1][0], 4 * p.width);
    _tile_stored(3, c[1][1], 4 * p.width);
  }
  for (int g = 0; g < kGroups; ++g) store_group(args, c[g], p.width, (group + g) * 16, n, panel.count);
}

void amx_matmul(const MatmulArgs<bfloat16>& args, int64_t n_begin, int64_t n_end) {
  const PackedX p(args.m, args.k);
  const TileScope scope{TileConfig(p.width)};
  const int64_t groups = packed_groups(args.m);
  // Groups of packed x that stay in the L2 cache (about 1 MiB of it) while the weights pass by.
  const int64_t fit = (int64_t{1} << 19) / p.group_size() / 2 * 2;
  const int64_t block = fit < 2 ? 2 : fit;

  for (int64_t g_begin = 0; g_begin < groups; g_begin += block) {
    const int64_t g_end = g_begin + block < groups ? g_begin + block : groups;
    for (int64_t n = n_begin; n < n_end; n += kPanel) {
      const Panel panel{args.weight + n * args.k, n_end - n < kPanel ? n_end - n : kPanel, args.k};
      int64_t g = g_begin;
      for (; g + 2 <= g_end; g += 2) multiply_and_store<2>(args, p, panel, n, g);
      if (g < g_end) multiply_and_store<1>(args, p, panel, n, g);
    }
  }
}

}  // namespace
}  // namespace tiny_vllm::TINY_VLLM_ISA
