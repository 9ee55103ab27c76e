// Exercise 3.1: out = a · x + y, for n numbers and any grid.
//
//   out (n) = a * x (n) + y (n)
//
// The grid may have more threads than there are numbers, or fewer: one block of one thread must do all of them. Nothing
// behind the n numbers may be written. Neighbouring threads should take neighbouring numbers.
#include "simt.h"

__global__ void axpy_kernel(float a, const float* x, const float* y, float* out, int n) {
  // Your turn. There are gridDim.x blocks of blockDim.x threads.
}

// What the test calls. The arrays have `room` numbers, so that it sees what is written behind the first n.
extern "C" const char* axpy(float a, const float* x, const float* y, float* out, int n, int room, int blocks,
                            int threads) {
  return report([&] {
    const DeviceArray<float> dx(x, room), dy(y, room), result(out, room);
    launch(axpy_kernel, blocks, threads, a, dx.get(), dy.get(), result.get(), n);
    result.copy_to(out);
  });
}
