// RoPE, the norms of queries and keys, and the write into the paged cache, in one pass over qkv.
//
// qkv (T, (H+2Hk)·Dh): queries are rotated in place; keys are rotated on their way into the cache, values go there as
// they are. Half-split: element i turns together with element i + Dh/2 (Su et al., arXiv 2104.09864).
//
// A value that is NaN or infinite (a broken checkpoint) would reach queries that must not see it: attention multiplies
// whole tiles, and the weight 0 of a later token makes NaN of it. So it goes into the cache as zeros, under a key of
// NaN, which makes NaN of those that do see it: a masked score is replaced, not multiplied.
// Bytes moved: 2 · T · (H + 2·Hk) · Dh elements, and 4 · T · Dh bytes of cos and sin.
#include "kernels/device.h"
#include "kernels/kernels.h"

namespace tiny_vllm {
namespace {

constexpr int kThreads = 128;

// Some lanes for each head of each token, as many as the head has vectors of N pairs: vector i is elements i·N.. and
// Dh/2 + i·N.. of the head.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) rope_and_cache_kernel(RopeAndCacheArgs<T> args, int lanes) {
  struct alignas(sizeof(T) * N) V {
    T at[N];
  };
  let_next_kernel_start();
  const AttentionShape& s = args.shape;
  const int heads = static_cast<int>(s.num_heads + 2 * s.num_kv_heads), dim = static_cast<int>(s.head_dim);
  const int lane = threadIdx.x % lanes, vectors = dim / (2 * N);
  const int64_t item = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / lanes;
  const int64_t token = item / heads;
  const int head = static_cast<int>(item % heads);
  const bool in_batch = token < args.num_tokens;  // all lanes of a warp stay for the sums below
  const int64_t slot = in_batch ? args.slot_mapping[token] : -1;
  const bool is_query = head < s.num_heads, is_value = head >= s.num_heads + s.num_kv_heads;
  const bool active = in_batch && (is_query || slot >= 0);

  T* from = args.qkv + (token * heads + head) * dim;
  T* to = from;
  if (!is_query) {
    const int64_t kv_head = (head - s.num_heads) % s.num_kv_heads;
    const int64_t block = slot / s.block_size, offset = slot % s.block_size;
    to = (is_value ? args.values : args.keys) + ((block * s.num_kv_heads + kv_head) * s.block_size + offset) * dim;
  }
  struct alignas(8 * N < 16 ? 8 * N : 16) Angles {
    float2 at[N];  // cos, sin
  };
  const auto* cos_sin = reinterpret_cast<const Angles*>(args.cos_sin + token * dim);
  Angles angles{};
  if (active && !is_value && lane < vectors) angles = cos_sin[lane];
  wait_for_previous_kernel();  // up to here all comes from the step's upload

  const auto first_half = [&](T* p, int i) -> V& { return reinterpret_cast<V*>(p)[i]; };
  const auto second_half = [&](T* p, int i) -> V& { return reinterpret_cast<V*>(p + dim / 2)[i]; };

  const T* norm = is_query ? args.q_norm : args.k_norm;
  float inverse_rms = 1;
  if (args.q_norm || args.k_norm) {
    float squares = 0;
    if (active) {
      for (int i = lane; i < vectors; i += lanes) {
        const V a = first_half(from, i), b = second_half(from, i);
#pragma unroll
        for (int e = 0; e < N; ++e)
          squares += load_float(a.at[e]) * load_float(a.at[e]) + load_float(b.at[e]) * load_float(b.at[e]);
      }
    }
    for (int offset = lanes / 2; offset > 0; offset /= 2) squares += __shfl_xor_sync(~0u, squares, offset);
    inverse_rms = __frsqrt_rn(squares / static_cast<float>(dim) + args.eps);
  }
  const auto over_lanes = [&](bool all) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) all &= __shfl_xor_sync(~0u, all, offset) != 0;
    return all;
  };
  bool value_is_finite = true;
  if (active && !is_query) {
    T* value = from + (is_value ? 0 : s.num_kv_heads * dim);
    for (int i = lane; i < vectors; i += lanes) {
      const V a = first_half(value, i), b = second_half(value, i);
#pragma unroll
      for (int e = 0; e < N; ++e) value_is_finite &= isfinite(load_float(a.at[e])) && isfinite(load_float(b.at[e]));
    }
  }
  value_is_finite = over_lanes(value_is_finite);
  if (!active) return;

  const auto normalised = [&](T x, int element) {
    if (!norm) return load_float(x);
    const float scaled = load_float(round_to<T>(load_float(x) * inverse_rms));
    return load_float(round_to<T>(scaled * load_float(norm[element])));
  };
  for (int i = lane; i < vectors; i += lanes) {
    V a = first_half(from, i), b = second_half(from, i);
    if (!is_value) {
      if (i != lane) angles = cos_sin[i];
#pragma unroll
      for (int e = 0; e < N; ++e) {
        const float2 angle = angles.at[e];
        const float x = normalised(a.at[e], i * N + e), y = normalised(b.at[e], dim / 2 + i * N + e);
        a.at[e] = round_to<T>(x * angle.x - y * angle.y);
        b.at[e] = round_to<T>(y * angle.x + x * angle.y);
      }
    }
    if (!is_query && !value_is_finite) {
#pragma unroll
      for (int e = 0; e < N; ++e) a.at[e] = b.at[e] = round_to<T>(is_value ? 0.0f : NAN);
    }
    first_half(to, i) = a;
    second_half(to, i) = b;
  }
}

template <typename T, int N>
void run(const Stream& stream, const RopeAndCacheArgs<T>& args) {
  const int64_t vectors = args.shape.head_dim / (2 * N);
  int lanes = 1;
  while (lanes < vectors && lanes < kWarp) lanes *= 2;
  const int64_t items = args.num_tokens * (args.shape.num_heads + 2 * args.shape.num_kv_heads);
  const int64_t bytes =
      args.num_tokens * args.shape.head_dim * 4 + 2 * items * args.shape.head_dim * static_cast<int64_t>(sizeof(T));
  launch(stream, {"rope_and_cache", bytes}, rope_and_cache_kernel<T, N>,
         dim3(static_cast<unsigned>((items * lanes + kThreads - 1) / kThreads)), kThreads, 0, args, lanes);
}

}  // namespace

template <typename T>
void rope_and_cache(const Stream& stream, const RopeAndCacheArgs<T>& args) {
  constexpr int kVector = Vector<T>::kSize;
  if (args.shape.head_dim % (2 * kVector) == 0) {
    run<T, kVector>(stream, args);
  } else {
    run<T, 1>(stream, args);
  }
}

template void rope_and_cache(const Stream&, const RopeAndCacheArgs<bfloat16>&);
template void rope_and_cache(const Stream&, const RopeAndCacheArgs<float>&);

}  // namespace tiny_vllm
