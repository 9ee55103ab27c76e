// Exercise 6.2: the largest number of each row and its place; of equal ones the first.
//
//   value (rows), place (rows) of x (rows, dim)
//
// The block has blockDim.x threads, a multiple of 32, at most 1024. dim is anything from 1 on. Numbers may be negative,
// and -infinity; none is NaN.
#include "simt.h"

struct Best {
  float value;
  int place;
};

// A total order: it does not matter who asks whom, so all lanes of a warp end with the same.
__device__ Best better(Best a, Best b) {
  if (a.value != b.value) return a.value > b.value ? a : b;
  return a.place < b.place ? a : b;
}

__device__ Best warp_best(Best best) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const Best other = {__shfl_xor_sync(0xffffffff, best.value, mask), __shfl_xor_sync(0xffffffff, best.place, mask)};
    best = better(best, other);
  }
  return best;
}

__global__ void row_max_kernel(const float* x, float* value, int* place, int dim) {
  __shared__ float values[32];
  __shared__ int places[32];
  x += int64_t(blockIdx.x) * dim;
  const Best none = {-INFINITY, 0x7fffffff};  // loses even against -infinity, by its place
  Best best = none;
  for (int i = threadIdx.x; i < dim; i += blockDim.x) best = better(best, {x[i], i});

  best = warp_best(best);
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (lane == 0) {
    values[threadIdx.x / 32] = best.value;
    places[threadIdx.x / 32] = best.place;
  }
  __syncthreads();
  best = warp_best(lane < warps ? Best{values[lane], places[lane]} : none);
  if (threadIdx.x == 0) {
    value[blockIdx.x] = best.value;
    place[blockIdx.x] = best.place;
  }
}

// What the test calls.
extern "C" const char* row_max(const float* x, float* value, int* place, int rows, int dim, int threads) {
  return report([&] {
    const DeviceArray<float> dx(x, size_t(rows) * dim), values(value, rows);
    const DeviceArray<int> places(place, rows);
    launch(row_max_kernel, rows, threads, dx.get(), values.get(), places.get(), dim);
    values.copy_to(value);
    places.copy_to(place);
  });
}
