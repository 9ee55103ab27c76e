// Finding the first tokens of a row of logits without sorting it: what sampling.cu and logprobs.cu share.
//
// The order: larger logits first, lower ids first among equals. One block of kSelectionThreads a row.
#pragma once

#include <cstdint>

#include "kernels/device.h"

namespace tiny_vllm {

// The place of a token in the order, as a number that is larger for earlier tokens: 32 bits that grow with the logit,
// then 32 bits that fall with the id. Not for NaN. Never 0.
__device__ __forceinline__ uint32_t key_of(float logit) {
  if (logit == 0) logit = 0.0f;  // -0 equals 0
  const uint32_t bits = __float_as_uint(logit);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float logit_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}
__device__ __forceinline__ uint64_t rank_of(float logit, int64_t id) {
  return uint64_t{key_of(logit)} << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
__device__ __forceinline__ uint32_t key_in(uint64_t rank) { return static_cast<uint32_t>(rank >> 32); }
__device__ __forceinline__ int32_t id_in(uint64_t rank) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(rank));
}

constexpr int kSelectionThreads = 1024;
constexpr int kDigits = 2048;  // two a thread
constexpr int kListed = 3072;  // ranks that fit into the list

struct SelectionRoom {
  uint32_t low[kDigits], high[kDigits];  // for each digit, a 64-bit sum in two halves
  uint64_t list[kListed];
  uint64_t sums[kWarp];
  uint64_t before, within;
  int digit;
  int listed;
  uint32_t max_key;
};

// Adds to a digit's sum. The sums are integers because their order of arrival is up to chance: integers add up to the
// same in any order, and so the same row always has the same cut.
__device__ __forceinline__ void add_to_digit(SelectionRoom& room, uint32_t digit, uint64_t x) {
  const uint32_t low = static_cast<uint32_t>(x);
  const uint32_t carry = atomicAdd(&room.low[digit], low) > 0xffffffffu - low;
  const uint32_t high = static_cast<uint32_t>(x >> 32) + carry;
  if (high) atomicAdd(&room.high[digit], high);
}

__device__ __forceinline__ uint64_t warp_scan(uint64_t x) {
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, static_cast<unsigned long long>(x), offset);
    if (threadIdx.x % kWarp >= offset) x += other;
  }
  return x;
}

// The sum over this thread and those before it; in `total` over all of the block.
__device__ __forceinline__ uint64_t block_scan(SelectionRoom& room, uint64_t x, uint64_t& total) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  x = warp_scan(x);
  __syncthreads();  // the sums may still be read from the last time
  if (lane == kWarp - 1) room.sums[warp] = x;
  __syncthreads();
  const unsigned long long warps = warp_scan(room.sums[lane]);  // 32 warps: a lane for each
  total = __shfl_sync(~0u, warps, kWarp - 1);
  const uint64_t before = __shfl_sync(~0u, warps, max(warp - 1, 0));
  return warp == 0 ? x : before + x;
}

// Where tokens are read from: the row, or a list of ranks in shared memory.
struct Tokens {
  const float* row;
  int64_t vocab_size;
  const uint64_t* list;
  int listed;  // negative: read the row

  template <typename Fn>
  __device__ __forceinline__ void for_each(Fn fn) const {
    if (listed >= 0) {
      for (int i = threadIdx.x; i < listed; i += kSelectionThreads) fn(list[i]);
      return;
    }
    constexpr int kAtOnce = 8;  // loads under way
    for (int64_t begin = threadIdx.x; begin < vocab_size; begin += kAtOnce * kSelectionThreads) {
      float x[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int64_t i = begin + j * kSelectionThreads;
        x[j] = i < vocab_size ? row[i] : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int64_t i = begin + j * kSelectionThreads;
        if (i < vocab_size) fn(rank_of(x[j], i));
      }
    }
  }
};

// Goes through the tokens with at least rank `cut` in order, adding up their measure, until the sum reaches `wanted`
// (at least 1), and moves the cut behind that token. False when the sum never does; the cut then stays. The new cut
// says nothing about ranks between the old and the new one that are not among the tokens.
//
// Nothing is sorted: a histogram of the measure over the highest digit of the ranks shows which digit the wanted token
// has, then one over the next digit of the tokens with that first digit, and so on (radix selection). The last three
// digits are those of the id; they are needed only when a part of several equal logits is kept.
template <typename Measure>
__device__ bool move_cut(SelectionRoom& room, const Tokens& tokens, uint64_t& cut, uint64_t wanted, Measure measure) {
  uint64_t prefix = 0, before = 0;  // the digits found so far, and the sum over all tokens before those that have them
  int shift = 64;
  while (shift > 0) {
    const int width = shift % 32 == 10 ? 10 : 11;  // the key has 32 bits, and so has the id: 11 + 11 + 10
    shift -= width;
    for (int i = threadIdx.x; i < kDigits; i += kSelectionThreads) room.low[i] = room.high[i] = 0;
    __syncthreads();
    if (threadIdx.x == 0) room.digit = -1;  // everyone has read the last one
    tokens.for_each([&](uint64_t rank) {
      if (rank >= cut && rank >> shift >> width == prefix)
        add_to_digit(room, static_cast<uint32_t>(rank >> shift) & ((1u << width) - 1), measure(rank));
    });
    __syncthreads();

    // Thread 0 has the two largest digits, thread 1 the next two.
    const int larger = kDigits - 1 - 2 * static_cast<int>(threadIdx.x), smaller = larger - 1;
    const uint64_t at_larger = uint64_t{room.high[larger]} << 32 | room.low[larger];
    const uint64_t at_smaller = uint64_t{room.high[smaller]} << 32 | room.low[smaller];
    uint64_t total;
    const uint64_t end = before + block_scan(room, at_larger + at_smaller, total);
    const uint64_t middle = end - at_smaller, begin = middle - at_larger;
    if (begin < wanted && wanted <= end) {  // at most one thread
      const bool at_first = wanted <= middle;
      room.digit = at_first ? larger : smaller;
      room.before = at_first ? begin : middle;
      room.within = at_first ? at_larger : at_smaller;
    }
    __syncthreads();
    if (room.digit < 0) return false;
    prefix = prefix << width | static_cast<uint32_t>(room.digit);
    before = room.before;
    // No token with this prefix measures less than the lowest one possible. If the sum without so much is too little,
    // the last of them is wanted, and with it all.
    if (wanted + measure(prefix << shift) > before + room.within) break;
  }
  cut = max(cut, prefix << shift);
  return true;
}

// The measure of move_cut() that counts tokens.
struct CountTokens {
  __device__ __forceinline__ uint64_t operator()(uint64_t) const { return 1; }
};

// The best key of a row, in room.max_key, and each thread's best token, in the list.
__device__ __forceinline__ void find_best(SelectionRoom& room, const Tokens& whole_row) {
  if (threadIdx.x == 0) {
    room.max_key = 0;
    room.listed = 0;
  }
  uint64_t best = 0;
  whole_row.for_each([&](uint64_t rank) { best = max(best, rank); });
  __syncthreads();
  const uint32_t warp_max = __reduce_max_sync(~0u, key_in(best));
  if (threadIdx.x % kWarp == 0) atomicMax(&room.max_key, warp_max);
  room.list[threadIdx.x] = best;
  __syncthreads();
}

// After find_best(): moves the cut behind the k-th of the threads' best tokens. The k best tokens of the row are not
// behind that, and not many others are before it, so that they nearly always fit into the list, which is free again.
__device__ __forceinline__ void bound_best(SelectionRoom& room, uint64_t& cut, uint64_t k) {
  move_cut(room, {nullptr, 0, room.list, kSelectionThreads}, cut, k, CountTokens{});
  __syncthreads();  // the list is read no more
}

// Puts a token into the list; one for which it has no room is counted in room.listed all the same.
__device__ __forceinline__ void add_to_list(SelectionRoom& room, uint64_t rank) {
  const int place = atomicAdd(&room.listed, 1);
  if (place < kListed) room.list[place] = rank;
}

// The listed tokens; all of the row's if there was no room for them. After a __syncthreads().
__device__ __forceinline__ Tokens listed_tokens(const SelectionRoom& room, const Tokens& whole_row) {
  if (room.listed > kListed) return whole_row;
  return {nullptr, 0, room.list, room.listed};
}

}  // namespace tiny_vllm
