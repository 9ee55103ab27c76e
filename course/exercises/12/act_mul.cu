// Exercise 12.1: the gate of the MLP.
//
//   out (rows, width) = silu(gate) · up,   gate_up (rows, 2 · width): in each row the gate's numbers, then up's
//
// silu(x) = x / (1 + e^-x). The grid has any number of blocks, and a block any number of threads: together they may be
// fewer than there are numbers, or more. rows · width may be larger than 2^31 on a GPU.
#include "simt.h"

__global__ void act_mul_kernel(const float* gate_up, float* out, int rows, int width) {
  // Your turn.
}

// What the test calls.
extern "C" const char* act_mul(const float* gate_up, float* out, int rows, int width, int blocks, int threads) {
  return report([&] {
    const size_t n = size_t(rows) * width;
    const DeviceArray<float> input(gate_up, 2 * n), result(out, n);
    launch(act_mul_kernel, blocks, threads, input.get(), result.get(), rows, width);
    result.copy_to(out);
  });
}
