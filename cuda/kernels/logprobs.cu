// Log probabilities: of the chosen token of each row and of the most likely ones, as Sampler::logprobs (cpp/sample)
// reports them: the same tokens and ranks. logit - log(sum of exp(logits)) is off by 1e-5 at most.
//
// logits (n, V) float32, tokens (n) -> out (n, kMaxLogprobs + 1)
//
// One block a row goes through it twice: for the largest logit and a bound that the wanted tokens are not behind; and
// for the sum, the rank of the chosen token, and a list of the few tokens before the bound. The rest happens in the
// list.
//
// Bytes moved: 8 · n · V, half of them from the L2 cache: a row is small.
#include "kernels/device.h"
#include "kernels/kernels.h"
#include "kernels/selection.h"

namespace tiny_vllm {
namespace {

__global__ void __launch_bounds__(kSelectionThreads) logprobs_kernel(LogprobsArgs args) {
  __shared__ SelectionRoom room;
  __shared__ float sums[kWarp];
  __shared__ uint64_t best[kMaxLogprobs];
  __shared__ int num_best;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t index = blockIdx.x, wanted = args.rows[index].num_logprobs;
  const int32_t chosen = args.tokens[index];
  if (wanted < 0 || chosen < 0) return;
  const int count = static_cast<int>(min(min(wanted, int64_t{kMaxLogprobs}), args.vocab_size));
  const float* logits = args.logits + index * args.vocab_size;
  DeviceLogprob* out = args.out + index * (kMaxLogprobs + 1);

  const Tokens whole_row{logits, args.vocab_size, nullptr, -1};
  if (threadIdx.x == 0) num_best = 0;
  find_best(room, whole_row);
  const float max_logit = logit_of(room.max_key);
  uint64_t cut = count > 0 ? 1 : ~uint64_t{0};  // all tokens, or none
  if (count > 0) bound_best(room, cut, count);

  const uint32_t chosen_key = key_of(logits[chosen]);
  float sum = 0;  // of a hundred numbers or two, and then as a tree
  uint64_t larger = 0;
  whole_row.for_each([&](uint64_t rank) {
    sum += expf(logit_of(key_in(rank)) - max_logit);
    larger += key_in(rank) > chosen_key;
    if (rank >= cut) add_to_list(room, rank);
  });
  const double log_sum = max_logit + log(static_cast<double>(block_sum(sum, sums)));
  const auto logprob = [&](uint32_t key) { return static_cast<float>(logit_of(key) - log_sum); };
  uint64_t all_larger;
  block_scan(room, larger, all_larger);
  if (threadIdx.x == 0) out[0] = {chosen, logprob(chosen_key), 1 + static_cast<int32_t>(all_larger)};
  if (count == 0) return;

  const Tokens tokens = listed_tokens(room, whole_row);
  move_cut(room, tokens, cut, count, CountTokens{});
  tokens.for_each([&](uint64_t rank) {
    if (rank >= cut) best[atomicAdd(&num_best, 1)] = rank;  // `count` times
  });
  __syncthreads();
  if (threadIdx.x >= count) return;
  const uint64_t rank = best[threadIdx.x];
  int place = 1;
  for (int i = 0; i < count; ++i) place += best[i] > rank;
  out[place] = {id_in(rank), logprob(key_in(rank)), place};
}

}  // namespace

void logprobs(const Stream& stream, const LogprobsArgs& args) {
  launch(stream, "logprobs", logprobs_kernel, dim3(static_cast<unsigned>(args.n)), kSelectionThreads, 0, args);
}

}  // namespace tiny_vllm
