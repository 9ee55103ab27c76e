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
#include "kernels/selection.h"

namespace tiny_vllm {
namespace {

// Below this temperature only equal logits still compete (but for logits as small as 1e-35), and 1 / temperature would
// leave the range of float.
__device__ __forceinline__ double temperature_of(const SampleRow& row) { return fmax(row.temperature, 1e-37); }

// ---- the cut
// ---------------------------------------------------------------------------------------------------------

constexpr int kTopPListed = 512;

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
__global__ void __launch_bounds__(kSelectionThreads)
    find_cuts_kernel(const float* logits, const SampleRow* rows, int64_t vocab_size, float one, uint64_t* cuts) {
  __shared__ SelectionRoom room;
  __shared__ uint32_t floor_key;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const SampleRow row = rows[blockIdx.x];
  uint64_t cut = 1;
  if (threadIdx.x == 0) cuts[blockIdx.x] = cut;
  if (!has_filter(row, vocab_size)) return;
  const bool has_top_k = row.top_k > 0 && row.top_k < vocab_size, has_top_p = row.top_p < 1;

  const Tokens whole_row{logits + blockIdx.x * vocab_size, vocab_size, nullptr, -1};
  find_best(room, whole_row);
  const float max_logit = logit_of(room.max_key);
  if (!(fabsf(max_logit) <= FLT_MAX)) return;  // the race will say that there is no answer

  if (row.min_p > 0) {
    if (threadIdx.x < kWarp) {
      const uint32_t floor = find_floor(max_logit, temperature_of(row), row.min_p);
      if (threadIdx.x == 0) floor_key = floor;
    }
    __syncthreads();
    cut = uint64_t{floor_key} << 32;
  }

  const float inverse_temperature = static_cast<float>(1 / temperature_of(row));
  const auto weight = [&](uint64_t rank) -> uint64_t {
    const float x = logit_of(key_in(rank));
    if (x == -INFINITY) return 0;  // and not e^(-inf · 0) at a temperature so high that its inverse is 0
    return __float2ull_rn(expf((x - max_logit) * inverse_temperature) * one);
  };
  if (has_top_k || has_top_p) {
    // Usually few tokens are kept, and then they fit into a list. For top_p alone the length of the list is a guess.
    uint64_t bound = cut;
    bound_best(room, bound, has_top_k ? row.top_k : kTopPListed);
    uint64_t sum = 0;
    whole_row.for_each([&](uint64_t rank) {
      if (rank >= cut && has_top_p && !has_top_k) sum += weight(rank);
      if (rank >= bound) add_to_list(room, rank);
    });
    __syncthreads();
    const Tokens tokens = listed_tokens(room, whole_row);
    if (has_top_k) {
      cut = bound;
      move_cut(room, tokens, cut, row.top_k, CountTokens{});
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

// Blocks that share the rows, but 64 for a row at most.
constexpr int64_t kRaceBlocks = 4;  // a multiprocessor

int race_splits(const Stream& stream, int64_t n) {
  return static_cast<int>(std::clamp<int64_t>(kRaceBlocks * stream.num_sms / std::max<int64_t>(1, n), 1, 64));
}

}  // namespace

// Enough for n rows and for any fewer, which are cut into more parts each.
int64_t sampling_partial_bytes(const Stream& stream, int64_t n) {
  return std::max(n, kRaceBlocks * stream.num_sms) * static_cast<int64_t>(sizeof(float4));
}

void sample_rows(const Stream& stream, const SamplingArgs& args) {
  if (args.cuts) {
    int bits = 62;
    for (int64_t v = args.vocab_size; v > 0; v /= 2) --bits;
    launch(stream, "find_cuts", find_cuts_kernel, dim3(static_cast<unsigned>(args.n)), kSelectionThreads, 0,
           args.logits, args.rows, args.vocab_size, static_cast<float>(int64_t{1} << bits), args.cuts);
  }
  const int splits = race_splits(stream, args.n);
  const bool aligned = args.vocab_size % 4 == 0 && reinterpret_cast<uintptr_t>(args.logits) % 16 == 0;
  launch(stream, "race", race_kernel, dim3(static_cast<unsigned>(args.n * splits)), kRaceThreads, 0, args.logits,
         args.rows, args.vocab_size, aligned, args.cuts, splits, static_cast<float4*>(args.partials), args.counters,
         args.tokens);
}

}  // namespace tiny_vllm
