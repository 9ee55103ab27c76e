// Rotary position embedding (Su et al., arXiv 2104.09864), and the key and value of each token into the paged cache.
//
// Half-split form, as Hugging Face checkpoints expect it: element i of a head is rotated together with element
// i + Dh/2. (The interleaved form of the paper pairs 2i with 2i+1; a checkpoint permuted for the one is rubbish in the
// other.) The rotation is done in float and rounded once.
#pragma once

#include "cpu/kernels.h"
#include "cpu/rms_norm_kernel.h"

namespace tiny_vllm::TINY_VLLM_ISA {
namespace {

// head (Dh) -> out (Dh), which may be head.
template <typename T>
inline void rotate(const T* head, const float* cos, const float* sin, int64_t half, T* out) {
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t n = half - i < 16 ? half - i : 16;
    const Vec c = load(cos + i), s = load(sin + i);
    const Vec a = n == 16 ? load(head + i) : load(head + i, n);
    const Vec b = n == 16 ? load(head + half + i) : load(head + half + i, n);
    const Vec first = a * c - b * s;
    const Vec second = b * c + a * s;
    if (n == 16) {
      store(out + i, first);
      store(out + half + i, second);
    } else {
      store(out + i, first, n);
      store(out + half + i, second, n);
    }
  }
}

template <typename T>
void rope_and_cache(const RopeArgs<T>& args, int64_t begin, int64_t end) {
  const AttentionShape& s = args.shape;
  const int64_t dim = s.head_dim, half = dim / 2;
  float cos[kMaxHeadDim / 2 + 16] = {}, sin[kMaxHeadDim / 2 + 16] = {};

  for (int64_t t = begin; t < end; ++t) {
    T* queries = args.qkv + t * (s.num_heads + 2 * s.num_kv_heads) * dim;
    T* keys = queries + s.num_heads * dim;
    const T* values = keys + s.num_kv_heads * dim;

    const float* angles = args.cos_sin + t * dim;
    for (int64_t i = 0; i < half; ++i) {
      cos[i] = angles[2 * i];
      sin[i] = angles[2 * i + 1];
    }

    for (int64_t h = 0; h < s.num_heads; ++h) {
      T* head = queries + h * dim;
      if (args.q_norm) rms_norm_row(head, args.q_norm, args.eps, head, dim);
      rotate(head, cos, sin, half, head);
    }

    const int64_t block = args.slot_mapping[t] / s.block_size, offset = args.slot_mapping[t] % s.block_size;
    for (int64_t h = 0; h < s.num_kv_heads; ++h) {
      const int64_t at = ((block * s.num_kv_heads + h) * s.block_size + offset) * dim;
      T* head = keys + h * dim;
      if (args.k_norm) rms_norm_row(head, args.k_norm, args.eps, head, dim);
      rotate(head, cos, sin, half, args.keys + at);
      for (int64_t i = 0; i < dim; ++i) args.values[at + i] = values[h * dim + i];
    }
  }
}

}  // namespace
}  // namespace tiny_vllm::TINY_VLLM_ISA
