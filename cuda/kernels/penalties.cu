// Penalties: logits change by what the rows' requests have said, as penalized() (cpp/sample/sampler.h) changes them, to
// the last bit.
//
// A few thousand tokens of a row change at most. One block a row.
//
// Bytes moved: 16 a token of the lists.
#include <cfloat>

#include "kernels/device.h"
#include "kernels/kernels.h"

namespace tiny_vllm {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float clamped(float x) { return fminf(fmaxf(x, -FLT_MAX), FLT_MAX); }

// The intrinsics keep the compiler from fusing a product and a difference into one rounding.
__device__ __forceinline__ float penalized(float logit, int32_t count, const SampleRow& row) {
  if (!(fabsf(logit) <= FLT_MAX)) return logit;
  const float repetition = static_cast<float>(fmin(fmax(row.repetition_penalty, double{FLT_MIN}), double{FLT_MAX}));
  float x = logit > 0 ? __fdiv_rn(logit, repetition) : __fmul_rn(logit, repetition);
  x = __fsub_rn(x, __fmul_rn(static_cast<float>(row.frequency_penalty), static_cast<float>(count)));
  if (count > 0) x = __fsub_rn(x, static_cast<float>(row.presence_penalty));
  return clamped(x);
}

__global__ void __launch_bounds__(kThreads) penalize_kernel(PenaltyArgs args) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t index = blockIdx.x;
  const SampleRow row = args.rows[index];
  if (!has_penalties(row)) return;
  float* x = args.logits + index * args.vocab_size;
  const int32_t last = args.last_tokens[index], last_count = row.last_is_output ? 1 : 0;
  bool found = false;
  for (int64_t i = args.starts[index] + static_cast<int64_t>(threadIdx.x); i < args.starts[index + 1]; i += kThreads) {
    const TokenCount of = args.counts[i];
    const bool is_last = of.token == last;
    found = found || is_last;
    x[of.token] = penalized(x[of.token], of.count + (is_last ? last_count : 0), row);
  }
  found = __syncthreads_or(found);
  if (threadIdx.x == 0 && !found && last >= 0) x[last] = penalized(x[last], last_count, row);
}

}  // namespace

void penalize(const Stream& stream, const PenaltyArgs& args) {
  launch(stream, "penalize", penalize_kernel, dim3(static_cast<unsigned>(args.n)), kThreads, 0, args);
}

}  // namespace tiny_vllm
