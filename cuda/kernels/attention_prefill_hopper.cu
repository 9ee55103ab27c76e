// Prefill attention for Hopper: what attention_prefill.cu does, with warpgroup products and the copy engine.
//
// qkv (T, (H+2Hk)·Dh), cache (NB, Hk, BS, Dh) -> out (T, H·Dh), causal, grouped queries, sliding window. Dh 64 or 128.
// Shah et al., arXiv 2407.08608 (FlashAttention-3), on pages.
//
// mma.sync reads keys and values from shared memory into registers for every 16 rows; wgmma feeds the tensor cores from
// shared memory for 64 rows at once. A block is three warpgroups (two with Dh 128) that compute, each on 64 query rows,
// and one that only starts copies. They meet at barriers, not at __syncthreads(): while one waits for its products, the
// others compute exponentials, which take as long as the products (4 a clock and multiprocessor quarter, against 512
// multiply-adds; a product of 64 × 128 × 64 has 64 of them for each exponential, and there are two).
//
// The copy engine brings a piece of a page (BS and 128 have at least 8 keys in common) at a time, one lane a piece.
#include <numeric>

#include "kernels/attention_tile.h"
#include "kernels/attention_work.h"
#include "kernels/barrier.h"
#include "kernels/kernels.h"
#include "kernels/warpgroup.h"
#include "tensor_map.h"

namespace tiny_vllm {
namespace {

constexpr int kKeys = 128;

template <int DP>
struct Config {
  static constexpr int kGroups = DP == 64 ? 3 : 2;  // warpgroups that compute
  static constexpr int kRows = kGroups * 64;
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kComputeRegisters = DP == 64 ? 160 : 240;
  static constexpr int kCopyRegisters = DP == 64 ? 32 : 24;
  static_assert(128 * (kGroups * kComputeRegisters + kCopyRegisters) <= 65536, "all registers that there are");
  static constexpr int kStages = DP == 64 ? 3 : 2;
  static constexpr int kTileBytes = kKeys * DP * 2;
  static constexpr int kQueryBytes = kRows * DP * 2;
  static constexpr int kSharedBytes = 1024 + kQueryBytes + kStages * 2 * kTileBytes;  // 1024: to align it
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Byte offset of a 16-byte chunk in a tile of ROWS rows, stored as groups of 64 columns, one after the other.
template <int ROWS>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  return static_cast<uint32_t>((chunk / 8) * ROWS * 128 + row * 128 + ((chunk ^ row) & 7) * 16);
}

__device__ __forceinline__ void sync_warpgroup(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");  // barrier 0 is __syncthreads()
}

// What all threads of a block know of its work.
struct Work {
  Rows rows;
  int group, kv_head;
  int first_position;                        // of the request's first query
  int keys_begin, keys_end, oldest, window;  // keys [oldest, keys_end) are seen by some row of the tile
  int num_tiles;                             // of kKeys, from keys_begin on
  const int32_t* blocks;                     // the request's row of block_tables
};

template <int STAGES>
struct Barriers {
  uint64_t keys[STAGES], values[STAGES], empty[STAGES];
};

// One warp: a lane for each piece of a tile.
template <int DP>
__device__ void copy_tiles(const Work& w, const AttentionShape& s, const CUtensorMap* keys, const CUtensorMap* values,
                           uint32_t tiles, Barriers<Config<DP>::kStages>& barriers, int piece_keys) {
  using C = Config<DP>;
  const int lane = threadIdx.x % kWarp, pieces = kKeys / piece_keys, block_size = static_cast<int>(s.block_size);
  for (int tile = 0; tile < w.num_tiles; ++tile) {
    const int stage = tile % C::kStages, round = tile / C::kStages;
    const int first = w.keys_begin + tile * kKeys + lane * piece_keys;
    const bool wanted = lane < pieces && first < w.keys_end && first + piece_keys > w.oldest;
    int row = 0;
    if (wanted)
      row = (w.blocks[first / block_size] * static_cast<int>(s.num_kv_heads) + w.kv_head) * block_size +
            first % block_size;
    const uint32_t bytes = __popc(__ballot_sync(~0u, wanted)) * piece_keys * DP * 2;
    if (round > 0) wait(&barriers.empty[stage], (round - 1) & 1);
    if (lane == 0) {
      arrive_and_expect(&barriers.keys[stage], bytes);
      arrive_and_expect(&barriers.values[stage], bytes);
    }
    __syncwarp();
    if (!wanted) continue;
    const uint32_t to = tiles + stage * 2 * C::kTileBytes + lane * piece_keys * 128;
#pragma unroll
    for (int half = 0; half < DP / 64; ++half)
      copy_box(to + half * kKeys * 128, keys, row, half * 64, &barriers.keys[stage]);
#pragma unroll
    for (int half = 0; half < DP / 64; ++half)
      copy_box(to + C::kTileBytes + half * kKeys * 128, values, row, half * 64, &barriers.values[stage]);
  }
}

// Rows of a tile of values that hold no visible key may hold anything, NaN too, and 0 · NaN is NaN.
template <int DP>
__device__ void clear_invisible(const Work& w, int begin, uint32_t values, int warpgroup) {
  const int visible_begin = max(0, w.oldest - begin), visible_end = min(kKeys, w.keys_end - begin);
  if (visible_begin == 0 && visible_end == kKeys) return;
  for (int i = threadIdx.x % 128; i < kKeys * DP / 8; i += 128) {
    const int row = i / (DP / 8), chunk = i % (DP / 8);
    if (row >= visible_begin && row < visible_end) continue;
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(values + swizzled<kKeys>(row, chunk)), "r"(0)
                 : "memory");
  }
  publish_to_wgmma();
  sync_warpgroup(warpgroup);
}

template <int DP>
__device__ void attend(const Work& w, const AttentionArgs<bfloat16>& args, uint32_t query_tile, uint32_t tiles,
                       Barriers<Config<DP>::kStages>& barriers) {
  using C = Config<DP>;
  const AttentionShape& s = args.shape;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warpgroup = warp / 4;
  const int64_t first_token = args.query_start[w.rows.request];

  // This warpgroup's queries.
  for (int i = threadIdx.x % 128; i < 64 * DP / 8; i += 128) {
    const int row = warpgroup * 64 + i / (DP / 8), chunk = i % (DP / 8), r = w.rows.first + row;
    const bool valid = r < w.rows.count;
    const int64_t heads = s.num_heads + 2 * s.num_kv_heads;
    const int64_t at =
        valid ? ((first_token + r / w.group) * heads + w.kv_head * w.group + r % w.group) * DP + chunk * 8 : 0;
    copy_async(query_tile + swizzled<C::kRows>(row, chunk), args.qkv + at, valid);
  }
  commit_copies();
  wait_for_copies<0>();
  publish_to_wgmma();
  sync_warpgroup(warpgroup);

  // This lane's rows g and g + 8 of its warp's 16.
  const int first_of_warp = w.rows.first + warp * 16;
  int position[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) position[r] = w.first_position + (first_of_warp + lane / 4 + 8 * r) / w.group;
  const int oldest_of_group = w.first_position + (w.rows.first + warpgroup * 64) / w.group - w.window + 1;
  const int last_of_group = w.first_position + (w.rows.first + warpgroup * 64 + 63) / w.group;

  const float scale = s.scale * kLog2E;
  float out[DP / 2] = {};
  OnlineSoftmax softmax;

  for (int tile = 0; tile < w.num_tiles; ++tile) {
    const int begin = w.keys_begin + tile * kKeys, stage = tile % C::kStages, parity = tile / C::kStages & 1;
    const uint32_t key_tile = tiles + stage * 2 * C::kTileBytes, value_tile = key_tile + C::kTileBytes;
    wait(&barriers.keys[stage], parity);
    if (begin > last_of_group || begin + kKeys <= oldest_of_group) {  // nothing that this warpgroup sees
      wait(&barriers.values[stage], parity);
      if (lane == 0) arrive(&barriers.empty[stage]);
      continue;
    }

    float scores[kKeys / 8][4];
    float(&flat)[kKeys / 2] = reinterpret_cast<float(&)[kKeys / 2]>(scores);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DP / 16; ++k) {
      const uint32_t step = (k % 4) * 32;  // 16 columns further, within the swizzled 128 bytes
      wgmma(flat, tile_descriptor(query_tile + (k / 4) * C::kRows * 128 + warpgroup * 64 * 128 + step),
            tile_descriptor(key_tile + (k / 4) * kKeys * 128 + step), k > 0);
    }
    wgmma_commit();
    wgmma_wait(flat);

    // Only at the two ends of what these rows see is there anything to mask.
    const int first_visible = w.first_position + first_of_warp / w.group;
    const int last_visible = w.first_position + (first_of_warp + 15) / w.group;
    if (begin + kKeys <= first_visible + 1 && begin > last_visible - w.window) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) flat[i] *= scale;
    } else {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = begin + n * 8 + (lane % 4) * 2 + i % 2, p = position[i / 2];
          scores[n][i] = key <= p && key > p - w.window ? scores[n][i] * scale : -INFINITY;
        }
      }
    }
    float factor[2];
    softmax.update(scores, factor);
#pragma unroll
    for (int i = 0; i < DP / 2; ++i) out[i] *= factor[i / 2 % 2];
    uint32_t weights[kKeys / 16][4];
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        weights[k][i] = pack(scores[2 * k + i / 2][2 * (i % 2)], scores[2 * k + i / 2][2 * (i % 2) + 1]);

    wait(&barriers.values[stage], parity);
    clear_invisible<DP>(w, begin, value_tile, warpgroup);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      wgmma(out, weights[k], tile_descriptor(value_tile + k * 16 * 128, kKeys * 128));
    wgmma_commit();
    wgmma_wait(out);
    if (lane == 0) arrive(&barriers.empty[stage]);
  }

  softmax.reduce();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_of_warp + lane / 4 + 8 * r;
    if (row >= w.rows.count) continue;
    const float inverse = softmax.sum[r] == 0 ? 0.0f : 1 / softmax.sum[r];
    bfloat16* to = args.out + ((first_token + row / w.group) * s.num_heads + w.kv_head * w.group + row % w.group) * DP;
#pragma unroll
    for (int n = 0; n < DP / 8; ++n)
      *reinterpret_cast<uint32_t*>(to + n * 8 + (lane % 4) * 2) =
          pack(out[n * 4 + 2 * r] * inverse, out[n * 4 + 2 * r + 1] * inverse);
  }
}

#endif

template <int DP>
__global__ void __launch_bounds__(Config<DP>::kThreads, 1)
    attention_prefill_hopper_kernel(AttentionArgs<bfloat16> args, const __grid_constant__ CUtensorMap keys,
                                    const __grid_constant__ CUtensorMap values, int piece_keys) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = Config<DP>;
  extern __shared__ unsigned char shared[];
  __shared__ Barriers<C::kStages> barriers;
  let_next_kernel_start();
  wait_for_previous_kernel();

  const AttentionShape& s = args.shape;
  Work w;
  w.group = static_cast<int>(s.num_heads / s.num_kv_heads);
  w.kv_head = blockIdx.y;
  w.rows =
      rows_of(args.query_start, static_cast<int>(args.num_requests), w.group, C::kRows, static_cast<int>(blockIdx.x));
  if (w.rows.count == 0) return;
  const int tokens = w.rows.count / w.group;
  if (tokens == 1) return;  // a decode: attention_decode does it
  w.first_position = args.context_len[w.rows.request] - tokens;
  w.blocks = args.block_tables + w.rows.request * args.block_table_width;
  const int last_row = min(w.rows.first + C::kRows, w.rows.count) - 1;
  w.keys_end = w.first_position + last_row / w.group + 1;
  w.window = s.sliding_window > 0 ? static_cast<int>(s.sliding_window) : max(w.keys_end, 1);
  w.oldest = max(0, w.first_position + w.rows.first / w.group - w.window + 1);
  w.keys_begin = w.oldest / kKeys * kKeys;
  w.num_tiles = (w.keys_end - w.keys_begin + kKeys - 1) / kKeys;

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < C::kStages; ++stage) {
      init_barrier(&barriers.keys[stage], 1);
      init_barrier(&barriers.values[stage], 1);
      init_barrier(&barriers.empty[stage], C::kGroups * 4);  // one arrival a warp
    }
    publish_barriers();
  }
  __syncthreads();

  const uint32_t query_tile = (shared_address(shared) + 1023) & ~1023u, tiles = query_tile + C::kQueryBytes;
  if (threadIdx.x >= C::kGroups * 128) {
    keep_registers<C::kCopyRegisters>();
    if (threadIdx.x < C::kGroups * 128 + kWarp) copy_tiles<DP>(w, s, &keys, &values, tiles, barriers, piece_keys);
  } else {
    take_registers<C::kComputeRegisters>();
    attend<DP>(w, args, query_tile, tiles, barriers);
  }
#endif
}

// Keys that a copy brings: what divides both a page and a tile.
int64_t piece_of(const AttentionShape& shape) { return std::gcd(shape.block_size, int64_t{kKeys}); }

template <int DP>
void run(const Stream& stream, const AttentionArgs<bfloat16>& args) {
  using C = Config<DP>;
  TV_CUDA(cudaFuncSetAttribute(attention_prefill_hopper_kernel<DP>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               C::kSharedBytes));
  const AttentionShape& s = args.shape;
  const int64_t cache_rows = args.num_blocks * s.num_kv_heads * s.block_size, piece = piece_of(s);
  const CUtensorMap keys = matrix_map(args.keys, cache_rows, DP, piece);
  const CUtensorMap values = matrix_map(args.values, cache_rows, DP, piece);
  const int64_t tiles = args.num_tokens * args.group() / C::kRows + args.num_requests;
  launch(stream, attention_work(stream, "attention_prefill_hopper", args, Queries::kSeveral),
         attention_prefill_hopper_kernel<DP>, dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(s.num_kv_heads)),
         C::kThreads, C::kSharedBytes, args, keys, values, static_cast<int>(piece));
}

}  // namespace

bool attention_prefill_hopper_takes(const Stream& stream, const AttentionArgs<bfloat16>& args) {
  const AttentionShape& s = args.shape;
  return stream.has_wgmma && (s.head_dim == 64 || s.head_dim == 128) && piece_of(s) >= 8 &&
         args.num_blocks * s.num_kv_heads * s.block_size <= INT32_MAX;  // rows of the cache have 32-bit numbers there
}

void attention_prefill_hopper(const Stream& stream, const AttentionArgs<bfloat16>& args) {
  if (args.shape.head_dim == 64) {
    run<64>(stream, args);
  } else {
    run<128>(stream, args);
  }
}

}  // namespace tiny_vllm
