// Decode attention: one query token a request, against its whole context. A read of the cache, and little else.
//
// qkv (R, (H+2Hk)·Dh), cache (NB, Hk, BS, Dh) -> out (R, H·Dh).  Bytes moved: 4 · Hk · Dh for each token of context.
//
// The G query heads of a KV head are rows of one 16-row tile, so the cache is read once for all of them, and tensor
// cores do the products. Few requests with long contexts would leave most of the GPU idle, so the context is cut into
// splits (Flash-Decoding, Dao et al., 2023): each block of threads takes one split of one request and KV head, each of
// its warps every fourth tile of keys. What they found is merged, first in shared memory and then, by the block that
// comes last, in global memory. How many splits there are does not depend on the contexts: a CUDA graph stays valid as
// they grow.
//
// The keys and values of all tokens but the newest were written in earlier steps, so the first tiles are asked for
// before the kernel that makes the newest ones has ended.
#include <algorithm>

#include "kernels/attention_tile.h"
#include "kernels/attention_work.h"
#include "kernels/kernels.h"

namespace tiny_vllm {
namespace {

constexpr int kRows = 16;        // query heads of one KV head that share a tile
constexpr int kSplitKeys = 256;  // a split is worth a block of threads from about this many keys on

template <int DP>
struct Config {
  static constexpr int kWarps = DP <= 128 ? 4 : 2;
  static constexpr int kKeys = DP <= 64 ? 32 : 16;  // a tile of one warp
  static constexpr int kStages = 2;
  static constexpr int kTileBytes = kKeys * DP * 2;
  static constexpr int kSharedBytes = kWarps * kStages * 2 * kTileBytes;
  static_assert(kSharedBytes >= kWarps * kRows * (DP + 2) * 4, "the merge reuses the tiles' memory");
};

// A merged row of a split, on its way to the block that comes last: DP numbers, max, sum.
template <int DP>
constexpr int kPartialFloats = DP + 2;

struct DecodeArgs {
  AttentionArgs<bfloat16> attention;
  int num_splits = 1;
  int num_row_tiles = 1;        // ceil(G / 16)
  float* partials = nullptr;    // (R, Hk · row tiles, splits, 16, DP + 2)
  unsigned* arrived = nullptr;  // (R, Hk · row tiles), zero before and after
};

// Merges `count` partial rows, `stride` floats apart: element d of the result, for this thread's d.
template <int DP>
__device__ float merge(const float* partial, int count, int64_t stride, int d, float* max_out, float* sum_out) {
  float largest = -INFINITY, sum = 0, out = 0;
  for (int i = 0; i < count; ++i) largest = fmaxf(largest, __ldcg(partial + i * stride + DP));
  for (int i = 0; i < count; ++i) {
    const float part_sum = __ldcg(partial + i * stride + DP + 1);
    if (part_sum == 0) continue;  // saw no key; e^(-inf + inf) would be NaN
    const float weight = exp2f(__ldcg(partial + i * stride + DP) - largest);
    sum += weight * part_sum;
    out += weight * __ldcg(partial + i * stride + d);
  }
  *max_out = largest;
  *sum_out = sum;
  return out;
}

template <int DP>
__global__ void __launch_bounds__(Config<DP>::kWarps* kWarp) attention_decode_kernel(DecodeArgs a) {
  using C = Config<DP>;
  constexpr int KEYS = C::kKeys, WARPS = C::kWarps, PF = kPartialFloats<DP>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ bool is_last;
  let_next_kernel_start();

  const AttentionArgs<bfloat16>& args = a.attention;
  const AttentionShape& s = args.shape;
  const int group = static_cast<int>(s.num_heads / s.num_kv_heads), head_dim = static_cast<int>(s.head_dim);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int request = blockIdx.x, split = blockIdx.z;
  const int kv_head = blockIdx.y / a.num_row_tiles, first_row = blockIdx.y % a.num_row_tiles * kRows;
  const int rows = min(kRows, group - first_row);
  const int64_t token = args.query_start[request];
  const int context = args.context_len[request], newest = context - 1;
  if (args.query_start[request + 1] - token != 1) {  // a prefill, in which more than the newest keys are new
    wait_for_previous_kernel();
    return;
  }

  // This split's tiles: an equal share of those that hold visible keys.
  const int oldest = s.sliding_window > 0 ? max(0, context - static_cast<int>(s.sliding_window)) : 0;
  const int begin_tile = oldest / KEYS, end_tile = (context + KEYS - 1) / KEYS;
  const int tiles_per_split = (end_tile - begin_tile + a.num_splits - 1) / a.num_splits;
  const int split_begin = begin_tile + split * tiles_per_split;
  const int split_end = min(end_tile, split_begin + tiles_per_split);

  const PageTable pages(args.block_tables + request * args.block_table_width, s, kv_head);
  const uint32_t ring = shared_address(shared) + warp * C::kStages * 2 * C::kTileBytes;
  const auto key_tile = [&](int stage) { return ring + stage * 2 * C::kTileBytes; };
  const auto value_tile = [&](int stage) { return key_tile(stage) + C::kTileBytes; };
  // A lane looks up one key, and the warp loads all of the tile, or all but one key.
  const auto load_tile = [&](int tile, int stage, int but = -1) {
    int64_t offset = -1;
    if (tile < split_end) {
      const int key = tile * KEYS + lane % KEYS;
      offset = key >= oldest && key < context ? pages.offset(key) : -1;
#pragma unroll
      for (int i = lane; i < KEYS * DP / 8; i += kWarp) {
        const int row = i / (DP / 8), chunk = i % (DP / 8);
        const int64_t key_offset = __shfl_sync(~0u, offset, row);
        if (tile * KEYS + row == but) continue;
        const bool valid = key_offset >= 0 && chunk * 8 < head_dim;
        const int64_t at = valid ? key_offset + chunk * 8 : 0;
        copy_async(key_tile(stage) + chunk_offset<DP>(row, chunk), args.keys + at, valid);
        copy_async(value_tile(stage) + chunk_offset<DP>(row, chunk), args.values + at, valid);
      }
    }
  };

  const int first_tile = split_begin + warp;
  const bool has_newest = first_tile == newest / KEYS && first_tile < split_end;
  const int64_t newest_offset = has_newest ? pages.offset(newest) : 0;
  load_tile(first_tile, 0, newest);
  wait_for_previous_kernel();
  for (int chunk = lane; has_newest && chunk < DP / 8; chunk += kWarp) {
    const bool valid = chunk * 8 < head_dim;
    const int64_t at = newest_offset + (valid ? chunk * 8 : 0);
    copy_async(key_tile(0) + chunk_offset<DP>(newest % KEYS, chunk), args.keys + at, valid);
    copy_async(value_tile(0) + chunk_offset<DP>(newest % KEYS, chunk), args.values + at, valid);
  }
  commit_copies();

  // Queries straight into fragments: row g (and g + 8) of the tile is query head first_row + g.
  const bfloat16* query =
      args.qkv + (token * (s.num_heads + 2 * s.num_kv_heads) + kv_head * group + first_row) * int64_t{head_dim};
  uint32_t queries[DP / 16][4];
#pragma unroll
  for (int k = 0; k < DP / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + (i % 2) * 8, d = k * 16 + (lane % 4) * 2 + (i / 2) * 8;
      queries[k][i] = row < rows && d < head_dim ? *reinterpret_cast<const uint32_t*>(query + row * head_dim + d) : 0;
    }
  }

  const float scale = s.scale * kLog2E;
  float out[DP / 8][4] = {};
  OnlineSoftmax softmax;
  int stage = 0;
  for (int tile = first_tile; tile < split_end; tile += WARPS) {
    load_tile(tile + WARPS, stage ^ 1);
    commit_copies();
    wait_for_copies<1>();
    __syncwarp();
    float scores[KEYS / 8][4];
    scores_of_tile<DP, KEYS>(queries, key_tile(stage), lane, scores);
    const bool all_visible = tile * KEYS >= oldest && (tile + 1) * KEYS <= context;
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = tile * KEYS + n * 8 + (lane % 4) * 2 + i % 2;
        scores[n][i] = all_visible || (key >= oldest && key < context) ? scores[n][i] * scale : -INFINITY;
      }
    }
    float factor[2];
    softmax.update(scores, factor);
#pragma unroll
    for (int n = 0; n < DP / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] *= factor[i / 2];
    add_values_of_tile<DP, KEYS>(scores, value_tile(stage), lane, out);
    __syncwarp();  // all lanes have read this stage before it is loaded again
    stage ^= 1;
  }
  softmax.reduce();
  wait_for_copies<0>();

  // Merge the warps: each writes its 16 rows into shared memory.
  __syncthreads();
  float* merged = reinterpret_cast<float*>(shared);  // (WARPS, 16, DP + 2)
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* row = merged + (warp * kRows + lane / 4 + 8 * r) * PF;
#pragma unroll
    for (int n = 0; n < DP / 8; ++n) {
      row[n * 8 + (lane % 4) * 2] = out[n][2 * r];
      row[n * 8 + (lane % 4) * 2 + 1] = out[n][2 * r + 1];
    }
    if (lane % 4 == 0) {
      row[DP] = softmax.max[r];
      row[DP + 1] = softmax.sum[r];
    }
  }
  __syncthreads();

  bfloat16* to = args.out + (token * s.num_heads + kv_head * group + first_row) * int64_t{head_dim};
  const int64_t item = int64_t{request} * gridDim.y + blockIdx.y;
  float* partials = a.partials + item * a.num_splits * kRows * PF;
  for (int i = threadIdx.x; i < rows * DP; i += WARPS * kWarp) {
    const int row = i / DP, d = i % DP;
    float max = -INFINITY, sum = 0, x = 0;
    for (int w = 0; w < WARPS; ++w) max = fmaxf(max, merged[(w * kRows + row) * PF + DP]);
    for (int w = 0; w < WARPS; ++w) {
      const float* part = merged + (w * kRows + row) * PF;
      if (part[DP + 1] == 0) continue;
      const float weight = exp2f(part[DP] - max);
      sum += weight * part[DP + 1];
      x += weight * part[d];
    }
    if (a.num_splits == 1) {
      if (d < head_dim) to[row * head_dim + d] = round_to<bfloat16>(sum == 0 ? 0.0f : x / sum);
      continue;
    }
    float* partial = partials + (split * kRows + row) * PF;
    __stcg(partial + d, x);
    if (d == 0) {
      __stcg(partial + DP, max);
      __stcg(partial + DP + 1, sum);
    }
  }
  if (a.num_splits == 1) return;

  // Merge the splits: the last block to arrive sees what all others have written.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(a.arrived + item, 1) == static_cast<unsigned>(a.num_splits - 1);
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int i = threadIdx.x; i < rows * DP; i += WARPS * kWarp) {
    const int row = i / DP, d = i % DP;
    float max, sum;
    const float x = merge<DP>(partials + row * PF, a.num_splits, kRows * PF, d, &max, &sum);
    if (d < head_dim) to[row * head_dim + d] = round_to<bfloat16>(sum == 0 ? 0.0f : x / sum);
  }
  if (threadIdx.x == 0) a.arrived[item] = 0;
}

int padded(int64_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }
int row_tiles(const AttentionShape& s) { return static_cast<int>((s.num_heads / s.num_kv_heads + kRows - 1) / kRows); }

// Enough splits to give every multiprocessor a few blocks, unless the contexts are too short for that.
int choose_splits(const Stream& stream, int64_t num_requests, int64_t max_context, const AttentionShape& s) {
  const int64_t blocks = num_requests * s.num_kv_heads * row_tiles(s);
  const int64_t wanted = (int64_t{4} * stream.num_sms + blocks - 1) / blocks;
  const int64_t useful = (max_context + kSplitKeys - 1) / kSplitKeys;
  return static_cast<int>(std::clamp<int64_t>(std::min(wanted, useful), 1, 128));
}

template <int DP>
void run(const Stream& stream, const DecodeArgs& args) {
  using C = Config<DP>;
  TV_CUDA(
      cudaFuncSetAttribute(attention_decode_kernel<DP>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes));
  const AttentionShape& s = args.attention.shape;
  launch(stream, attention_work(stream, "attention_decode", args.attention, Queries::kOne), attention_decode_kernel<DP>,
         dim3(static_cast<unsigned>(args.attention.num_requests),
              static_cast<unsigned>(s.num_kv_heads * args.num_row_tiles), static_cast<unsigned>(args.num_splits)),
         C::kWarps * kWarp, C::kSharedBytes, args);
}

}  // namespace

DecodeScratch attention_decode_scratch(const Stream& stream, int64_t num_requests, int64_t max_context,
                                       const AttentionShape& shape) {
  const int64_t items = num_requests * shape.num_kv_heads * row_tiles(shape);
  const int64_t splits = choose_splits(stream, num_requests, max_context, shape);
  return {items * splits * kRows * (padded(shape.head_dim) + 2), items};
}

void attention_decode(const Stream& stream, const AttentionArgs<bfloat16>& attention, float* partials,
                      unsigned* arrived) {
  DecodeArgs args;
  args.attention = attention;
  args.num_splits = choose_splits(stream, attention.num_requests, attention.max_context, attention.shape);
  args.num_row_tiles = row_tiles(attention.shape);
  args.partials = partials;
  args.arrived = arrived;
  switch (padded(attention.shape.head_dim)) {
    case 64:
      return run<64>(stream, args);
    case 128:
      return run<128>(stream, args);
    default:
      return run<256>(stream, args);
  }
}

}  // namespace tiny_vllm
