// Prefill attention for Hopper: what attention_prefill.cu does, with warpgroup products.
//
// qkv (T, (H+2Hk)·Dh), cache (NB, Hk, BS, Dh) -> out (T, H·Dh), causal, grouped queries, sliding window. Dh 64 or 128.
// Shah et al., arXiv 2407.08608 (FlashAttention-3), without its specialised producer warps.
//
// mma.sync reads keys and values from shared memory into registers for every 16 rows; wgmma feeds the tensor cores from
// shared memory for 64 rows at once. Three warpgroups share each tile of keys and values. While one waits for its
// products the others compute their exponentials, which take about as long: 64 × 128 of them per tile and warpgroup.
#include "kernels/attention_tile.h"
#include "kernels/kernels.h"
#include "kernels/warpgroup.h"

namespace tiny_vllm {
namespace {

constexpr int kGroups = 3;
constexpr int kThreads = kGroups * 128;
constexpr int kRows = kGroups * 64;
constexpr int kKeys = 128;
constexpr int kStages = 2;

template <int DP>
struct Config {
  static constexpr int kTileBytes = kKeys * DP * 2;
  static constexpr int kQueryBytes = kRows * DP * 2;
  static constexpr int kSharedBytes = 1024 + kQueryBytes + kStages * 2 * kTileBytes;  // 1024: to align it
};

// Byte offset of a 16-byte chunk in a tile of ROWS rows, stored as groups of 64 columns, one after the other.
template <int ROWS>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  return static_cast<uint32_t>((chunk / 8) * ROWS * 128 + row * 128 + ((chunk ^ row) & 7) * 16);
}

template <int DP>
__global__ void __launch_bounds__(kThreads, 1) attention_prefill_hopper_kernel(AttentionArgs<bfloat16> args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = Config<DP>;
  extern __shared__ unsigned char shared[];
  __shared__ int64_t offsets[kStages][kKeys];  // of each key of a tile; negative: none
  let_next_kernel_start();
  wait_for_previous_kernel();

  const AttentionShape& s = args.shape;
  const int group = static_cast<int>(s.num_heads / s.num_kv_heads);
  const int kv_head = blockIdx.y, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warpgroup = warp / 4;
  const Rows rows = rows_of(args.query_start, static_cast<int>(args.num_requests), group, kRows,
                            static_cast<int>(gridDim.x - 1 - blockIdx.x));
  if (rows.count == 0) return;
  const int tokens = rows.count / group, context = args.context_len[rows.request];
  if (tokens == 1) return;  // a decode: attention_decode does it
  const int first_position = context - tokens;
  const int64_t first_token = args.query_start[rows.request];
  const PageTable pages(args.block_tables + rows.request * args.block_table_width, s, kv_head);

  // Keys that some row of this tile sees, from a multiple of kKeys on.
  const int last_row = min(rows.first + kRows, rows.count) - 1;
  const int keys_end = first_position + last_row / group + 1;
  const int window = s.sliding_window > 0 ? static_cast<int>(s.sliding_window) : keys_end;
  const int oldest = max(0, first_position + rows.first / group - window + 1);
  const int keys_begin = oldest / kKeys * kKeys;
  const int num_tiles = (keys_end - keys_begin + kKeys - 1) / kKeys;

  const uint32_t query_tile = (shared_address(shared) + 1023) & ~1023u;
  const auto key_tile = [&](int stage) { return query_tile + C::kQueryBytes + stage * 2 * C::kTileBytes; };
  const auto value_tile = [&](int stage) { return key_tile(stage) + C::kTileBytes; };

  const auto find_tile = [&](int tile) {
    if (threadIdx.x < kKeys) {
      const int key = keys_begin + tile * kKeys + threadIdx.x;
      offsets[tile % kStages][threadIdx.x] = key >= oldest && key < keys_end ? pages.offset(key) : -1;
    }
  };
  const auto load_tile = [&](int tile) {
    const int stage = tile % kStages;
    for (int i = threadIdx.x; i < kKeys * DP / 8; i += kThreads) {
      const int row = i / (DP / 8), chunk = i % (DP / 8);
      const int64_t offset = offsets[stage][row];
      const int64_t at = offset >= 0 ? offset + chunk * 8 : 0;
      copy_async(key_tile(stage) + swizzled<kKeys>(row, chunk), args.keys + at, offset >= 0);
      copy_async(value_tile(stage) + swizzled<kKeys>(row, chunk), args.values + at, offset >= 0);
    }
  };

  // Queries, and the first tile.
  for (int i = threadIdx.x; i < kRows * DP / 8; i += kThreads) {
    const int row = i / (DP / 8), chunk = i % (DP / 8), r = rows.first + row;
    const bool valid = r < rows.count;
    const int64_t heads = s.num_heads + 2 * s.num_kv_heads;
    const int64_t at = valid ? ((first_token + r / group) * heads + kv_head * group + r % group) * DP + chunk * 8 : 0;
    copy_async(query_tile + swizzled<kRows>(row, chunk), args.qkv + at, valid);
  }
  find_tile(0);
  __syncthreads();
  load_tile(0);
  commit_copies();

  // This lane's rows g and g + 8 of its warp's 16.
  const int first_of_warp = rows.first + warp * 16;
  int position[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) position[r] = first_position + (first_of_warp + lane / 4 + 8 * r) / group;
  const int oldest_of_group = first_position + (rows.first + warpgroup * 64) / group - window + 1;
  const int last_of_group = first_position + (rows.first + warpgroup * 64 + 63) / group;

  const float scale = s.scale * kLog2E;
  float out[DP / 2] = {};
  OnlineSoftmax softmax;

  for (int tile = 0; tile < num_tiles; ++tile) {
    if (tile + 1 < num_tiles) find_tile(tile + 1);  // its place was last read by load_tile(tile - 1)
    wait_for_copies<0>();
    publish_to_wgmma();
    __syncthreads();  // this tile is there, and all are done with the one before
    if (tile + 1 < num_tiles) load_tile(tile + 1);
    commit_copies();

    const int begin = keys_begin + tile * kKeys, stage = tile % kStages;
    if (begin > last_of_group || begin + kKeys <= oldest_of_group) continue;  // nothing that this warpgroup sees

    float scores[kKeys / 8][4];
    float(&flat)[kKeys / 2] = reinterpret_cast<float(&)[kKeys / 2]>(scores);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DP / 16; ++k) {
      const uint32_t step = (k % 4) * 32;  // 16 columns further, within the swizzled 128 bytes
      wgmma(flat, tile_descriptor(query_tile + (k / 4) * kRows * 128 + warpgroup * 64 * 128 + step),
            tile_descriptor(key_tile(stage) + (k / 4) * kKeys * 128 + step), k > 0);
    }
    wgmma_commit();
    wgmma_wait(flat);

    // Only at the two ends of what these rows see is there anything to mask.
    const int first_visible = first_position + first_of_warp / group;
    const int last_visible = first_position + (first_of_warp + 15) / group;
    if (begin + kKeys <= first_visible + 1 && begin > last_visible - window) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) flat[i] *= scale;
    } else {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = begin + n * 8 + (lane % 4) * 2 + i % 2, p = position[i / 2];
          scores[n][i] = key <= p && key > p - window ? scores[n][i] * scale : -INFINITY;
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
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      wgmma(out, weights[k], tile_descriptor(value_tile(stage) + k * 16 * 128, kKeys * 128));
    wgmma_commit();
    wgmma_wait(out);
  }

  softmax.reduce();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_of_warp + lane / 4 + 8 * r;
    if (row >= rows.count) continue;
    const float inverse = softmax.sum[r] == 0 ? 0.0f : 1 / softmax.sum[r];
    bfloat16* to = args.out + ((first_token + row / group) * s.num_heads + kv_head * group + row % group) * DP;
#pragma unroll
    for (int n = 0; n < DP / 8; ++n)
      *reinterpret_cast<uint32_t*>(to + n * 8 + (lane % 4) * 2) =
          pack(out[n * 4 + 2 * r] * inverse, out[n * 4 + 2 * r + 1] * inverse);
  }
#endif
}

template <int DP>
void run(const Stream& stream, const AttentionArgs<bfloat16>& args) {
  using C = Config<DP>;
  TV_CUDA(cudaFuncSetAttribute(attention_prefill_hopper_kernel<DP>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               C::kSharedBytes));
  const int64_t tiles = args.num_tokens * args.group() / kRows + args.num_requests;
  launch(stream, "attention_prefill_hopper", attention_prefill_hopper_kernel<DP>,
         dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(args.shape.num_kv_heads)), kThreads, C::kSharedBytes,
         args);
}

}  // namespace

bool attention_prefill_hopper_takes(const Stream& stream, const AttentionShape& shape) {
  return stream.has_wgmma && (shape.head_dim == 64 || shape.head_dim == 128);
}

void attention_prefill_hopper(const Stream& stream, const AttentionArgs<bfloat16>& args) {
  if (args.shape.head_dim == 64) {
    run<64>(stream, args);
  } else {
    run<128>(stream, args);
  }
}

}  // namespace tiny_vllm
