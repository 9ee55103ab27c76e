// What all kernels share: bfloat16 to float and back, 16-byte vectors, sums over a warp and a block.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "base/dtype.h"

namespace tiny_vllm {

constexpr int kWarp = 32;

__device__ __forceinline__ float load_float(float x) { return x; }
__device__ __forceinline__ float load_float(bfloat16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

template <typename T>
__device__ __forceinline__ T round_to(float x);
template <>
__device__ __forceinline__ float round_to<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bfloat16 round_to<bfloat16>(float x) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}

// The two bfloat16 of a 32-bit word, the lower one first.
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// 16 bytes of elements, moved in one access.
template <typename T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T at[kSize];
};

__device__ __forceinline__ float warp_sum(float x) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}

// The sum over all threads of the block, in each of them. `room` is shared memory for one float a warp.
__device__ __forceinline__ float block_sum(float x, float* room) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  x = warp_sum(x);
  __syncthreads();  // the room may still be read from the last time
  if (lane == 0) room[warp] = x;
  __syncthreads();
  return warp_sum(lane < warps ? room[lane] : 0.0f);
}

}  // namespace tiny_vllm
