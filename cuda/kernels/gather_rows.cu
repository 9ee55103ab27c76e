// Gather: rows of a table, picked by number. The embedding of a token is row `id` of the embedding table, and the
// logits are wanted for some rows of the hidden states only: both are this kernel.
//
// x (?, D)[rows (n)] -> out (n, D).  Bytes moved: 2 · n · D · size of an element.
//
// A token may be known to the device only: ~i stands for the one sampled for row i of the step before. The kernel puts
// it in its place, for whoever reads the ids later.
#include "kernels/device.h"
#include "kernels/kernels.h"

namespace tiny_vllm {
namespace {

// One block a row. V is the widest type that divides a row: 16 bytes when D allows it.
template <typename V>
__global__ void gather_rows_kernel(const V* x, int32_t* rows, const int32_t* sampled, V* out, int64_t width) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  int32_t row = rows[blockIdx.x];
  if (sampled && row < 0) {
    row = sampled[~row];
    __syncthreads();  // everyone has read the old number
    if (threadIdx.x == 0) rows[blockIdx.x] = row;
  }
  V* to = out + int64_t{blockIdx.x} * width;
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) to[i] = row < 0 ? V{} : x[int64_t{row} * width + i];
}

void gather(const Stream& stream, const char* name, const void* x, int32_t* rows, const int32_t* sampled, void* out,
            int64_t n, int64_t row_bytes) {
  const auto run = [&]<typename V>(V) {
    const int64_t width = row_bytes / static_cast<int64_t>(sizeof(V));
    const int threads = width >= 256 ? 256 : 64;
    launch(stream, {name, 2 * n * row_bytes}, gather_rows_kernel<V>, dim3(static_cast<unsigned>(n)), threads, 0,
           static_cast<const V*>(x), rows, sampled, static_cast<V*>(out), width);
  };
  if (row_bytes % 16 == 0) {
    run(uint4{});
  } else if (row_bytes % 4 == 0) {
    run(uint32_t{});
  } else {
    run(uint16_t{});
  }
}

}  // namespace

void gather_rows(const Stream& stream, const void* x, const int32_t* rows, void* out, int64_t n, int64_t row_bytes) {
  gather(stream, "gather_rows", x, const_cast<int32_t*>(rows), nullptr, out, n, row_bytes);  // only read
}

void embedding(const Stream& stream, const void* table, int32_t* ids, const int32_t* sampled, void* out, int64_t n,
               int64_t row_bytes) {
  gather(stream, "embedding", table, ids, sampled, out, n, row_bytes);
}

}  // namespace tiny_vllm
