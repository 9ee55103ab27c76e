// What a request does to single logits before its penalties (cpp/sample/logit_edits.h): tokens outside a set become
// -infinity, and biases are added, -infinity for what is banned. One block a row.
//
// And copies of rows before they change: log probabilities are of the raw logits.
//
// logits (n, V) float32, in place.  Bytes moved: up to 8 · n · V where there are sets, and for copies; else next to
// none.
#include <cmath>

#include "kernels/device.h"
#include "kernels/kernels.h"

namespace tiny_vllm {
namespace {

constexpr int kThreads = 1024;

__global__ void __launch_bounds__(kThreads) edit_logits_kernel(EditArgs args) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t index = blockIdx.x;
  float* x = args.logits + index * args.vocab_size;
  const int32_t set = args.rows[index].allowed;
  if (set >= 0) {
    const uint32_t* allowed = args.allowed + set * ((args.vocab_size + 31) / 32);
    for (int64_t i = threadIdx.x; i < args.vocab_size; i += kThreads)
      if ((allowed[i / 32] >> i % 32 & 1) == 0) x[i] = -INFINITY;
    __syncthreads();
  }
  if (!args.starts) return;
  const int32_t end = args.starts[index + 1];
  // A token may come twice, banned and with a bias.
  for (int32_t i = args.starts[index] + static_cast<int32_t>(threadIdx.x); i < end; i += kThreads)
    atomicAdd(x + args.biases[i].token, args.biases[i].bias);
}

__global__ void __launch_bounds__(kThreads)
    keep_raw_kernel(const float* logits, const SampleRow* rows, float* raw, int64_t vocab_size) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (rows[blockIdx.x].num_logprobs < 0) return;
  const int64_t row = int64_t{blockIdx.x} * vocab_size;
  for (int64_t i = int64_t{blockIdx.y} * kThreads + threadIdx.x; i < vocab_size; i += int64_t{gridDim.y} * kThreads)
    raw[row + i] = logits[row + i];
}

}  // namespace

void edit_logits(const Stream& stream, const EditArgs& args) {
  launch(stream, "edit_logits", edit_logits_kernel, dim3(static_cast<unsigned>(args.n)), kThreads, 0, args);
}

void keep_raw(const Stream& stream, const float* logits, const SampleRow* rows, float* raw, int64_t n,
              int64_t vocab_size) {
  constexpr unsigned kPartsOfRow = 8;
  launch(stream, {"keep_raw", 8 * n * vocab_size}, keep_raw_kernel, dim3(static_cast<unsigned>(n), kPartsOfRow),
         kThreads, 0, logits, rows, raw, vocab_size);
}

}  // namespace tiny_vllm
