// Prefill attention on tensor cores: FlashAttention with the keys and values of a paged cache.
//
// qkv (T, (H+2Hk)·Dh), cache (NB, Hk, BS, Dh) -> out (T, H·Dh), causal, grouped queries, sliding window.
// Dao, arXiv 2307.08691 (FlashAttention-2); pages as in Kwon et al., arXiv 2309.06180.
//
// The G query heads of a KV head read the same keys, so their queries are rows of one tile: row i of a request is head
// i % G of token i / G. A block of threads takes a tile of query rows and walks over the keys, a tile at a time; while
// one tile is worked on, the next is on its way into shared memory. Scores never leave the registers.
//
// A chunk of a prompt, the rest after a prefix hit and a recomputation differ only in context_len - tokens, the
// position of the first query. Work: 4 · Dh operations for each visible pair of query and key.
#include "kernels/attention_tile.h"
#include "kernels/attention_work.h"
#include "kernels/kernels.h"

namespace tiny_vllm {
namespace {

constexpr int kWarps = 4;
constexpr int kStages = 2;

template <int DP>
struct Config {
  static constexpr int kRowTiles = DP <= 64 ? 2 : 1;  // 16-row tiles a warp; a longer head leaves registers for one
  static constexpr int kRows = kWarps * kRowTiles * 16;
  static constexpr int kKeys = DP <= 128 ? 64 : 32;
  static constexpr int kTileBytes = kKeys * DP * 2;
  static constexpr int kQueryBytes = kRows * DP * 2;
  static constexpr int kSharedBytes = kQueryBytes + kStages * 2 * kTileBytes;
};

template <int DP>
__global__ void __launch_bounds__(kWarps* kWarp) attention_prefill_kernel(AttentionArgs<bfloat16> args) {
  using C = Config<DP>;
  constexpr int MT = C::kRowTiles, KEYS = C::kKeys;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int64_t offsets[kStages][KEYS];  // of each key of a tile; negative: none
  let_next_kernel_start();
  wait_for_previous_kernel();

  const AttentionShape& s = args.shape;
  const int group = static_cast<int>(s.num_heads / s.num_kv_heads), head_dim = static_cast<int>(s.head_dim);
  const int kv_head = blockIdx.y, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Rows rows =
      rows_of(args.query_start, static_cast<int>(args.num_requests), group, C::kRows, static_cast<int>(blockIdx.x));
  if (rows.count == 0) return;
  const int tokens = rows.count / group, context = args.context_len[rows.request];
  if (tokens == 1) return;  // a decode: attention_decode does it
  const int first_position = context - tokens;
  const int64_t first_token = args.query_start[rows.request];
  const PageTable pages(args.block_tables + rows.request * args.block_table_width, s, kv_head);

  // Keys that some row of this tile sees, from a multiple of KEYS on.
  const int last_row = min(rows.first + C::kRows, rows.count) - 1;
  const int keys_end = first_position + last_row / group + 1;
  const int window = s.sliding_window > 0 ? static_cast<int>(s.sliding_window) : keys_end;
  const int oldest = max(0, first_position + rows.first / group - window + 1);
  const int keys_begin = oldest / KEYS * KEYS;
  const int num_tiles = (keys_end - keys_begin + KEYS - 1) / KEYS;

  const uint32_t query_tile = shared_address(shared);
  const auto key_tile = [&](int stage) { return query_tile + C::kQueryBytes + stage * 2 * C::kTileBytes; };
  const auto value_tile = [&](int stage) { return key_tile(stage) + C::kTileBytes; };

  const auto find_tile = [&](int tile) {
    if (threadIdx.x < KEYS) {
      const int key = keys_begin + tile * KEYS + threadIdx.x;
      offsets[tile % kStages][threadIdx.x] = key >= oldest && key < keys_end ? pages.offset(key) : -1;
    }
  };
  const auto load_tile = [&](int tile) {
    const int stage = tile % kStages;
    for (int i = threadIdx.x; i < KEYS * DP / 8; i += kWarps * kWarp) {
      const int row = i / (DP / 8), chunk = i % (DP / 8);
      const int64_t offset = offsets[stage][row];
      const bool valid = offset >= 0 && chunk * 8 < head_dim;
      const int64_t at = valid ? offset + chunk * 8 : 0;
      copy_async(key_tile(stage) + chunk_offset<DP>(row, chunk), args.keys + at, valid);
      copy_async(value_tile(stage) + chunk_offset<DP>(row, chunk), args.values + at, valid);
    }
  };

  // Queries, and the first tile.
  for (int i = threadIdx.x; i < C::kRows * DP / 8; i += kWarps * kWarp) {
    const int row = i / (DP / 8), chunk = i % (DP / 8), r = rows.first + row;
    const bool valid = r < rows.count && chunk * 8 < head_dim;
    const int64_t heads = s.num_heads + 2 * s.num_kv_heads;
    const int64_t at =
        valid ? ((first_token + r / group) * heads + kv_head * group + r % group) * head_dim + chunk * 8 : 0;
    copy_async(query_tile + chunk_offset<DP>(row, chunk), args.qkv + at, valid);
  }
  find_tile(0);
  __syncthreads();
  load_tile(0);
  commit_copies();

  // Positions of this lane's rows: of each 16-row tile rows g and g + 8.
  int position[MT][2];
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      position[m][r] = first_position + (rows.first + (warp * MT + m) * 16 + lane / 4 + 8 * r) / group;

  const float scale = s.scale * kLog2E;
  uint32_t queries[MT][DP / 16][4];
  float out[MT][DP / 8][4] = {};
  OnlineSoftmax softmax[MT];

  for (int tile = 0; tile < num_tiles; ++tile) {
    if (tile + 1 < num_tiles) find_tile(tile + 1);  // its place was last read by load_tile(tile - 1)
    wait_for_copies<0>();
    __syncthreads();  // this tile is there, and all are done with the one before
    if (tile + 1 < num_tiles) load_tile(tile + 1);
    commit_copies();

    if (tile == 0) {
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int k = 0; k < DP / 16; ++k)
          ldmatrix(queries[m][k], query_tile + chunk_offset<DP>((warp * MT + m) * 16 + lane % 16, 2 * k + lane / 16));
    }

    const int begin = keys_begin + tile * KEYS, stage = tile % kStages;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      float scores[KEYS / 8][4];
      scores_of_tile<DP, KEYS>(queries[m], key_tile(stage), lane, scores);
      // Only at the two ends of what these rows see is there anything to mask.
      const int first_of_tile = first_position + (rows.first + (warp * MT + m) * 16) / group;
      const int last_of_tile = first_position + (rows.first + (warp * MT + m) * 16 + 15) / group;
      const bool all_visible = begin + KEYS <= first_of_tile + 1 && begin > last_of_tile - window;
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = begin + n * 8 + (lane % 4) * 2 + i % 2, p = position[m][i / 2];
          const bool visible = all_visible || (key <= p && key > p - window);
          scores[n][i] = visible ? scores[n][i] * scale : -INFINITY;
        }
      }
      float factor[2];
      softmax[m].update(scores, factor);
#pragma unroll
      for (int n = 0; n < DP / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][n][i] *= factor[i / 2];
      add_values_of_tile<DP, KEYS>(scores, value_tile(stage), lane, out[m]);
    }
  }

#pragma unroll
  for (int m = 0; m < MT; ++m) {
    softmax[m].reduce();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = rows.first + (warp * MT + m) * 16 + lane / 4 + 8 * r;
      if (row >= rows.count) continue;
      const float inverse = softmax[m].sum[r] == 0 ? 0.0f : 1 / softmax[m].sum[r];
      bfloat16* to = args.out + ((first_token + row / group) * s.num_heads + kv_head * group + row % group) * head_dim;
#pragma unroll
      for (int n = 0; n < DP / 8; ++n) {
        const int d = n * 8 + (lane % 4) * 2;
        if (d < head_dim)
          *reinterpret_cast<uint32_t*>(to + d) = pack(out[m][n][2 * r] * inverse, out[m][n][2 * r + 1] * inverse);
      }
    }
  }
}

template <int DP>
void run(const Stream& stream, const AttentionArgs<bfloat16>& args) {
  using C = Config<DP>;
  TV_CUDA(
      cudaFuncSetAttribute(attention_prefill_kernel<DP>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes));
  const int64_t tiles = args.num_tokens * args.group() / C::kRows + args.num_requests;
  launch(stream, attention_work(stream, "attention_prefill", args, Queries::kSeveral), attention_prefill_kernel<DP>,
         dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(args.shape.num_kv_heads)), kWarps * kWarp,
         C::kSharedBytes, args);
}

}  // namespace

void attention_prefill(const Stream& stream, const AttentionArgs<bfloat16>& args) {
  if (args.shape.head_dim <= 64) {
    run<64>(stream, args);
  } else if (args.shape.head_dim <= 128) {
    run<128>(stream, args);
  } else {
    run<256>(stream, args);
  }
}

}  // namespace tiny_vllm
