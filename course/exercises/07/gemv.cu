// Exercise 7.3: one row of x, and a warp for each row of the weight.
//
//   out (N) = weight (N, K) · x (K)
//
// The block has blockDim.x threads, a multiple of 32, so blockDim.x / 32 warps; there are enough blocks for all N rows,
// and some warps may have none. K is anything from 1 on. Neighbouring threads should read neighbouring numbers.
#include "simt.h"

__global__ void gemv_kernel(const float* weight, const float* x, float* out, int columns, int inner) {
  // Your turn. `columns` is N, `inner` is K.
}

// What the test calls. Memory has `room` rows of the weight, so that it sees what is done behind the first N.
extern "C" const char* gemv(const float* weight, const float* x, float* out, int columns, int room, int inner,
                            int threads) {
  return report([&] {
    const DeviceArray<float> dw(weight, size_t(room) * inner), dx(x, inner), result(out, room);
    const int warps = threads / 32;
    launch(gemv_kernel, (columns + warps - 1) / warps, threads, dw.get(), dx.get(), result.get(), columns, inner);
    result.copy_to(out);
  });
}
