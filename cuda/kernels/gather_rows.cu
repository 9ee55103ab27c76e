// Gather: rows of a table, picked by number. The embedding of a token is row `id` of the embedding table, and the
// logits are wanted for some rows of the hidden states only: both are this kernel.
//
// x (?, D)[rows (n)] -> out (n, D).  Bytes moved: 2 · n · D · size of an element.
#include "kernels/device.h"
#include "kernels/kernels.h"

namespace tiny_vllm {
namespace {

// One block a row. V is the widest type that divides a row: 16 bytes when D allows it.
template <typename V>
__global__ void gather_rows_kernel(const V* x, const int32_t* rows, V* out, int64_t width) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t row = rows[blockIdx.x];
  V* to = out + int64_t{blockIdx.x} * width;
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) to[i] = row < 0 ? V{} : x[row * width + i];
}

}  // namespace

void gather_rows(const Stream& stream, const void* x, const int32_t* rows, void* out, int64_t n, int64_t row_bytes) {
  const auto run = [&]<typename V>(V) {
    const int64_t width = row_bytes / static_cast<int64_t>(sizeof(V));
    const int threads = width >= 256 ? 256 : 64;
    launch(stream, {"gather_rows", 2 * n * row_bytes}, gather_rows_kernel<V>, dim3(static_cast<unsigned>(n)), threads,
           0, static_cast<const V*>(x), rows, static_cast<V*>(out), width);
  };
  if (row_bytes % 16 == 0) {
    run(uint4{});
  } else if (row_bytes % 4 == 0) {
    run(uint32_t{});
  } else {
    run(uint16_t{});
  }
}

}  // namespace tiny_vllm
