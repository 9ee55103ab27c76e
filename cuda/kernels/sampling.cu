// Sampling: a token from each row of logits, as Sampler (cpp/sample) chooses it.
//
// logits (n, V) float32, rows (n) -> tokens (n); -1 for a row with NaN or +infinity, or only -infinity.
//
// Put the tokens of a row in order: larger logits first, lower ids first among equals. min_p, top_k and top_p each keep
// a beginning of that order, so all three together are one cut in it. The first kernel finds the cut of each row that
// has filters; the second runs the race among the tokens before the cut.
//
// The race in logarithms is argmax (x_i / temperature + g_i) with g_i = -log(-log(u_i)): it needs neither the maximum
// nor a sum, so one pass does it. Without g it is the argmax of greedy rows.
//
// Bytes moved: 4 · n · V by the race, from memory; 8 · n · V by the first kernel when few tokens are kept, and up to
// 4 · 15 · n · V when it must go through whole rows for each digit.
#include <algorithm>
#include <cfloat>

#include "kernels/device.h"
#include "kernels/kernels.h"

namespace tiny_vllm {
namespace {

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

// Below this temperature only equal logits still compete (but for logits as small as 1e-35), and 1 / temperature would
// leave the range of float.
__device__ __forceinline__ double temperature_of(const SampleRow& row) { return fmax(row.temperature, 1e-37); }

// ---- the cut
// ---------------------------------------------------------------------------------------------------------

constexpr int kCutThreads = 1024;
constexpr int kDigits = 2048;  // two a thread
constexpr int kListed = 3072;
constexpr int kTopPListed = 512;

struct CutRoom {
  uint32_t low[kDigits], high[kDigits];  // for each digit, a 64-bit sum in two halves
  uint64_t list[kListed];
  uint64_t sums[kWarp];
  uint64_t before, within;
  int digit;
  int listed;
  uint32_t max_key, floor_key;
};

// Adds to a digit's sum. The sums are integers because their order of arrival is up to chance: integers add up to the
// same in any order, and so the same row always has the same cut.
__device__ __forceinline__ void add_to_digit(CutRoom& room, uint32_t digit, uint64_t x) {
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
__device__ __forceinline__ uint64_t block_scan(CutRoom& room, uint64_t x, uint64_t& total) {
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
      for (int i = threadIdx.x; i < listed; i += kCutThreads) fn(list[i]);
      return;
    }
    constexpr int kAtOnce = 8;  // loads under way
    for (int64_t begin = threadIdx.x; begin < vocab_size; begin += kAtOnce * kCutThreads) {
      float x[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int64_t i = begin + j * kCutThreads;
        x[j] = i < vocab_size ? row[i] : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int64_t i = begin + j * kCutThreads;
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
__device__ bool move_cut(CutRoom& room, const Tokens& tokens, uint64_t& cut, uint64_t wanted, Measure measure) {
  uint64_t prefix = 0, before = 0;  // the digits found so far, and the sum over all tokens before those that have them
  int shift = 64;
  while (shift > 0) {
    const int width = shift % 32 == 10 ? 10 : 11;  // the key has 32 bits, and so has the id: 11 + 11 + 10
    shift -= width;
    for (int i = threadIdx.x; i < kDigits; i += kCutThreads) room.low[i] = room.high[i] = 0;
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

// The smallest key whose weight is at least min_p, for a warp: seven rounds in which each lane tries a key, in float64
// as the CPU computes it.
__device__ uint32_t find_floor(float max_logit, double temperature, double min_p) {
  const uint32_t lane = threadIdx.x % kWarp, max_key = key_of(max_logit);
  uint32_t floor = 0;  // all keys below have failed
  for (int shift = 30; shift >= 0; shift -= 5) {
    const bool exists = shift < 30 || lane < 4;
    const uint32_t key = floor + (lane << shift) + ((1u << shift) - 1);  // the largest of the lane's share
    const bool kept = key >= max_key || exp((static_cast<double>(logit_of(key)) - max_logit) / temperature) >= min_p;
    floor += __popc(__ballot_sync(~0u, exists && !kept)) << shift;
  }
  return floor;
}

// One block a row. `one` is what the weight 1 counts in integer sums: large, but V times as much fits into 63 bits.
__global__ void __launch_bounds__(kCutThreads)
    find_cuts_kernel(const float* logits, const SampleRow* rows, int64_t vocab_size, float one, uint64_t* cuts) {
  __shared__ CutRoom room;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const SampleRow row = rows[blockIdx.x];
  uint64_t cut = 1;
  if (threadIdx.x == 0) cuts[blockIdx.x] = cut;
  if (!has_filter(row, vocab_size)) return;
  const bool has_top_k = row.top_k > 0 && row.top_k < vocab_size, has_top_p = row.top_p < 1;

  // Each thread's best token, and the best of them.
  const Tokens whole_row{logits + blockIdx.x * vocab_size, vocab_size, nullptr, -1};
  if (threadIdx.x == 0) {
    room.max_key = 0;
    room.listed = 0;
  }
  uint64_t best = 0;
  whole_row.for_each([&](uint64_t rank) { best = max(best, rank); });
  __syncthreads();
  const uint32_t warp_max = __reduce_max_sync(~0u, static_cast<uint32_t>(best >> 32));
  if (threadIdx.x % kWarp == 0) atomicMax(&room.max_key, warp_max);
  room.list[threadIdx.x] = best;
  __syncthreads();
  const float max_logit = logit_of(room.max_key);
  if (!(fabsf(max_logit) <= FLT_MAX)) return;  // the race will say that there is no answer

  if (row.min_p > 0) {
    if (threadIdx.x < kWarp) {
      const uint32_t floor = find_floor(max_logit, temperature_of(row), row.min_p);
      if (threadIdx.x == 0) room.floor_key = floor;
    }
    __syncthreads();
    cut = uint64_t{room.floor_key} << 32;
  }

  const float inverse_temperature = static_cast<float>(1 / temperature_of(row));
  const auto count = [](uint64_t) -> uint64_t { return 1; };
  const auto weight = [&](uint64_t rank) -> uint64_t {
    const float x = logit_of(static_cast<uint32_t>(rank >> 32));
    return __float2ull_rn(expf((x - max_logit) * inverse_temperature) * one);
  };
  if (has_top_k || has_top_p) {
    // Usually few tokens are kept, and then they fit into a list. The k-th best of the threads' best tokens is a bound:
    // the k best tokens are not behind it, and not many others are before it. For top_p alone 512 is a guess.
    uint64_t bound = cut;
    move_cut(room, {nullptr, 0, room.list, kCutThreads}, bound, has_top_k ? row.top_k : kTopPListed, count);
    __syncthreads();  // the list is read no more
    uint64_t sum = 0;
    whole_row.for_each([&](uint64_t rank) {
      if (rank >= cut && has_top_p && !has_top_k) sum += weight(rank);
      if (rank < bound) return;
      const int place = atomicAdd(&room.listed, 1);
      if (place < kListed) room.list[place] = rank;
    });
    __syncthreads();
    Tokens tokens = whole_row;
    if (room.listed <= kListed) {
      tokens.list = room.list;
      tokens.listed = room.listed;
    }
    if (has_top_k) {
      cut = bound;
      move_cut(room, tokens, cut, row.top_k, count);
    }
    if (has_top_p) {
      if (has_top_k) tokens.for_each([&](uint64_t rank) { sum += rank >= cut ? weight(rank) : 0; });
      uint64_t total;
      block_scan(room, sum, total);
      const auto wanted = static_cast<uint64_t>(ceil(row.top_p * static_cast<double>(total)));
      const uint64_t reachable = min(max(wanted, uint64_t{1}), total);
      bound = max(bound, cut);
      if (move_cut(room, tokens, bound, reachable, weight)) {
        cut = bound;
      } else {  // more tokens are kept than are before the bound
        move_cut(room, whole_row, cut, reachable, weight);
      }
    }
  }
  if (threadIdx.x == 0) cuts[blockIdx.x] = cut;
}

// ---- the race
// --------------------------------------------------------------------------------------------------------

constexpr int kRaceThreads = 256;
constexpr float kMaxGumbel = 22.88f;  // 33 log 2 is the largest that 32 random bits give

// Philox 4x32-10: see cpp/sample/philox.h.
__device__ __forceinline__ uint4 philox(uint4 counter, uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter.x, b = uint64_t{0xCD9E8D57u} * counter.z;
    counter = {static_cast<uint32_t>(b >> 32) ^ counter.y ^ k0, static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter.w ^ k1, static_cast<uint32_t>(a)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

// -log(-log(u)) with u = (bits + 1/2) / 2³². Near 1, u is taken from the other end, or float32 would round it to 1.
// Off by less than 2e-6.
__device__ __forceinline__ float gumbel(uint32_t bits) {
  const bool near_one = bits & 0x80000000u;
  const float u = (static_cast<float>(near_one ? ~bits : bits) + 0.5f) * 0x1p-32f;
  return -logf(near_one ? -log1pf(-u) : -logf(u));
}

struct Runner {
  float logit;
  float noise;
  int32_t id;  // -1: nobody
  int32_t no_answer;
};

// Differences of logits, not sums with the noise: at low temperatures these would round the noise away. In float64 the
// outcome does not depend on who meets whom first, and so not on how many blocks share a row.
__device__ __forceinline__ bool beats(const Runner& a, const Runner& b, double inverse_temperature) {
  if (a.id < 0 || b.id < 0) return b.id < 0 && a.id >= 0;
  const double lead =
      (static_cast<double>(a.logit) - b.logit) * inverse_temperature + (static_cast<double>(a.noise) - b.noise);
  return lead > 0 || (lead == 0 && a.id < b.id);
}

__device__ __forceinline__ void meet(Runner& best, const Runner& other, double inverse_temperature) {
  const int32_t no_answer = best.no_answer | other.no_answer;
  if (beats(other, best, inverse_temperature)) best = other;
  best.no_answer = no_answer;
}

// The best of the block, in its thread 0.
__device__ Runner block_best(Runner best, double inverse_temperature) {
  __shared__ Runner room[kRaceThreads / kWarp];
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const Runner other{__shfl_xor_sync(~0u, best.logit, offset), __shfl_xor_sync(~0u, best.noise, offset),
                       __shfl_xor_sync(~0u, best.id, offset), __shfl_xor_sync(~0u, best.no_answer, offset)};
    meet(best, other, inverse_temperature);
  }
  __syncthreads();  // the room may still be read from the last time
  if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = best;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int i = 1; i < kRaceThreads / kWarp; ++i) meet(best, room[i], inverse_temperature);
  return best;
}

// A row is cut among `splits` blocks, or one multiprocessor alone would read it. A thread takes four tokens at a time:
// those of one Philox block.
__global__ void __launch_bounds__(kRaceThreads)
    race_kernel(const float* logits, const SampleRow* rows, int64_t vocab_size, bool aligned, const uint64_t* cuts,
                int splits, float4* partials, unsigned* arrived, int32_t* tokens) {
  __shared__ bool is_last;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t index = blockIdx.x / splits, split = blockIdx.x % splits;
  const SampleRow row = rows[index];
  const uint64_t cut = cuts ? cuts[index] : 0;
  const bool greedy = is_greedy(row);
  const double inverse_temperature = greedy ? 1 : 1 / temperature_of(row);
  const float inverse = static_cast<float>(inverse_temperature), max_noise = greedy ? 0 : kMaxGumbel;
  const auto position = static_cast<uint64_t>(row.position);
  const float* x = logits + index * vocab_size;

  Runner best{-INFINITY, 0, -1, 0};
  const int64_t fours = (vocab_size + 3) / 4;
  const int64_t end = fours * (split + 1) / splits;
  for (int64_t four = fours * split / splits + threadIdx.x; four < end; four += kRaceThreads) {
    float at[4];
    if (aligned) {
      const float4 v = reinterpret_cast<const float4*>(x)[four];
      at[0] = v.x, at[1] = v.y, at[2] = v.z, at[3] = v.w;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) at[j] = four * 4 + j < vocab_size ? x[four * 4 + j] : -INFINITY;
    }
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!(at[j] <= FLT_MAX)) best.no_answer = 1;
      if (rank_of(at[j], four * 4 + j) < cut) at[j] = -INFINITY;
      largest = fmaxf(largest, at[j]);
    }
    // Random numbers cost more than all the rest: only for those who could win with the best of luck.
    if (largest == -INFINITY || (largest - best.logit) * inverse + (max_noise - best.noise) < -1e-4f) continue;
    uint4 words{};
    if (!greedy)
      words = philox(
          {static_cast<uint32_t>(four), static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0},
          row.seed);
    const uint32_t bits[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (at[j] == -INFINITY) continue;
      const Runner runner{at[j], greedy ? 0.0f : gumbel(bits[j]), static_cast<int32_t>(four * 4 + j), 0};
      // float32 settles it for nearly all; it is off by 1e-5 at most where the two are close.
      if ((runner.logit - best.logit) * inverse + (runner.noise - best.noise) < -1e-4f) continue;
      meet(best, runner, inverse_temperature);
    }
  }
  best = block_best(best, inverse_temperature);

  if (threadIdx.x == 0) {
    __stcg(partials + index * splits + split,
           {best.logit, best.noise, __int_as_float(best.id), __int_as_float(best.no_answer)});
    __threadfence();
    is_last = atomicAdd(arrived + index, 1) == splits - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  best = {-INFINITY, 0, -1, 0};
  for (int i = threadIdx.x; i < splits; i += kRaceThreads) {
    const float4 other = __ldcg(partials + index * splits + i);
    meet(best, {other.x, other.y, __float_as_int(other.z), __float_as_int(other.w)}, inverse_temperature);
  }
  best = block_best(best, inverse_temperature);
  if (threadIdx.x == 0) {
    tokens[index] = best.no_answer ? -1 : best.id;
    arrived[index] = 0;
  }
}

int race_splits(const Stream& stream, int64_t n) {
  return static_cast<int>(std::clamp<int64_t>(int64_t{4} * stream.num_sms / std::max<int64_t>(1, n), 1, 64));
}

}  // namespace

int64_t sampling_partial_bytes(const Stream& stream, int64_t n) {
  return n * race_splits(stream, n) * static_cast<int64_t>(sizeof(float4));
}

void sample_rows(const Stream& stream, const SamplingArgs& args) {
  if (args.cuts) {
    int bits = 62;
    for (int64_t v = args.vocab_size; v > 0; v /= 2) --bits;
    launch(stream, "find_cuts", find_cuts_kernel, dim3(static_cast<unsigned>(args.n)), kCutThreads, 0, args.logits,
           args.rows, args.vocab_size, static_cast<float>(int64_t{1} << bits), args.cuts);
  }
  const int splits = race_splits(stream, args.n);
  const bool aligned = args.vocab_size % 4 == 0 && reinterpret_cast<uintptr_t>(args.logits) % 16 == 0;
  launch(stream, "race", race_kernel, dim3(static_cast<unsigned>(args.n * splits)), kRaceThreads, 0, args.logits,
         args.rows, args.vocab_size, aligned, args.cuts, splits, static_cast<float4*>(args.partials), args.counters,
         args.tokens);
}

}  // namespace tiny_vllm
