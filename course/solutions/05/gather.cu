// Exercise 5.1: rows of a table, and zeros for those that are not there.
//
//   out (n, D) = table (V, D)[ids (n)];  a row of zeros where the id is negative, or not below V
//
// One block a row, with blockDim.x threads, any number from 1 to 1024. D is anything from 1 on. The table may be large:
// more than 2^31 numbers.
#include "simt.h"

__global__ void gather_kernel(const uint16_t* table, const int* ids, uint16_t* out, int vocab, int dim) {
  const int id = ids[blockIdx.x];
  const uint16_t* from = table + int64_t(id) * dim;  // not read if there is no such row
  uint16_t* to = out + int64_t(blockIdx.x) * dim;
  const bool is_there = id >= 0 && id < vocab;
  for (int i = threadIdx.x; i < dim; i += blockDim.x) to[i] = is_there ? from[i] : uint16_t(0);
}

// What the test calls.
extern "C" const char* gather(const uint16_t* table, const int* ids, uint16_t* out, int vocab, int n, int dim,
                              int threads) {
  return report([&] {
#ifdef __CUDACC__
    const DeviceArray<uint16_t> copy(table, size_t(vocab) * dim);  // a CPU reads the table where it is
    table = copy.get();
#endif
    const DeviceArray<int> numbers(ids, n);
    const DeviceArray<uint16_t> result(out, size_t(n) * dim);
    launch(gather_kernel, n, threads, table, numbers.get(), result.get(), vocab, dim);
    result.copy_to(out);
  });
}
