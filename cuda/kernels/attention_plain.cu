// Paged attention as plainly as it can be said on a GPU: one warp for each query row and head, a tile of 32 keys at a
// time. It takes any dtype and any head_dim; float32 runs on it, and the fast kernels are compared with it.
//
// qkv (T, (H+2Hk)·Dh), cache (NB, Hk, BS, Dh) -> out (T, H·Dh). Each query head reads its keys by itself, so the cache
// is read H / Hk times over (from L2): 4 · Dh · context bytes a row and head in float32.
#include "kernels/attention_work.h"
#include "kernels/device.h"
#include "kernels/kernels.h"

namespace tiny_vllm {
namespace {

constexpr int kWarpsPerBlock = 4;
constexpr int kMaxHeadDim = 512;

// The request that a row of the batch belongs to: the last r with query_start[r] <= row.
__device__ int64_t request_of(const int32_t* query_start, int64_t num_requests, int64_t row) {
  int64_t low = 0, high = num_requests - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (query_start[middle] <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

template <typename T>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock) attention_plain_kernel(AttentionArgs<T> args) {
  __shared__ float queries[kWarpsPerBlock][kMaxHeadDim];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const AttentionShape& s = args.shape;
  const int64_t dim = s.head_dim;
  const int lane = threadIdx.x % kWarp;
  const int64_t item = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarp;
  const int64_t row = item / s.num_heads, head = item % s.num_heads;
  if (row >= args.num_tokens) return;
  const int64_t request = request_of(args.query_start, args.num_requests, row);
  const int64_t context = args.context_len[request];
  const int64_t position = context - (args.query_start[request + 1] - row);
  const int64_t oldest = s.sliding_window > 0 ? max(int64_t{0}, position - s.sliding_window + 1) : 0;
  const int32_t* blocks = args.block_tables + request * args.block_table_width;
  const int64_t kv_head = head / (s.num_heads / s.num_kv_heads);

  float* query = queries[threadIdx.x / kWarp];
  const T* from = args.qkv + (row * (s.num_heads + 2 * s.num_kv_heads) + head) * dim;
  for (int64_t i = lane; i < dim; i += kWarp) query[i] = load_float(from[i]);
  __syncwarp();

  float largest = -INFINITY, sum = 0;   // of all keys so far
  float out[kMaxHeadDim / kWarp] = {};  // elements lane, lane + 32, ...
  for (int64_t begin = oldest; begin <= position; begin += kWarp) {
    const int64_t key = begin + lane;  // a key a lane
    float score = -INFINITY;
    int64_t offset = 0;
    if (key <= position) {
      offset = ((blocks[key / s.block_size] * s.num_kv_heads + kv_head) * s.block_size + key % s.block_size) * dim;
      score = 0;
      for (int64_t i = 0; i < dim; ++i) score += query[i] * load_float(args.keys[offset + i]);
      score *= s.scale;
    }
    const float old = largest;
    largest = fmaxf(largest, warp_max(score));
    const float shift = largest == -INFINITY ? 0.0f : largest;  // scores of -inf alone
    const float factor = expf(old - shift), weight = expf(score - shift);
    sum = sum * factor + warp_sum(weight);
#pragma unroll
    for (int i = 0; i < kMaxHeadDim / kWarp; ++i) out[i] *= factor;
    const int keys = static_cast<int>(min(int64_t{kWarp}, position + 1 - begin));
    for (int j = 0; j < keys; ++j) {
      const float w = __shfl_sync(~0u, weight, j);
      const T* value = args.values + __shfl_sync(~0u, offset, j);
#pragma unroll
      for (int i = 0; i < kMaxHeadDim / kWarp; ++i)
        if (lane + i * kWarp < dim) out[i] += w * load_float(value[lane + i * kWarp]);
    }
  }
  T* to = args.out + (row * s.num_heads + head) * dim;
#pragma unroll
  for (int i = 0; i < kMaxHeadDim / kWarp; ++i)
    if (lane + i * kWarp < dim) to[lane + i * kWarp] = round_to<T>(sum == 0 ? 0.0f : out[i] / sum);
}

}  // namespace

template <typename T>
void attention_plain(const Stream& stream, const AttentionArgs<T>& args) {
  const int64_t items = args.num_tokens * args.shape.num_heads;
  launch(stream, attention_work(stream, "attention_plain", args, Queries::kAll), attention_plain_kernel<T>,
         dim3(static_cast<unsigned>((items + kWarpsPerBlock - 1) / kWarpsPerBlock)), kWarp * kWarpsPerBlock, 0, args);
}

template void attention_plain(const Stream&, const AttentionArgs<bfloat16>&);
template void attention_plain(const Stream&, const AttentionArgs<float>&);

}  // namespace tiny_vllm
