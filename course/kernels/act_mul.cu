// The gate of the MLP, in three steps, and one mistake: gate_up (rows, 2F) -> out (rows, F), out = silu(gate) · up.
//
// In each row of gate_up the F numbers of the gate come first, then the F of up. Chapter 12 of the course.
#include "simt.h"

#include <algorithm>

constexpr int kThreads = 256;

__device__ float silu(float x) { return x / (1 + expf(-x)); }

// 1. One kernel for each of the two operations: what is between them goes to memory and back.
__global__ void activate(const float* gate_up, float* activated, int rows, int width) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= int64_t(rows) * width) return;
  const int64_t row = i / width, column = i % width;
  activated[i] = silu(gate_up[row * 2 * width + column]);
}
__global__ void multiply(const float* gate_up, const float* activated, float* out, int rows, int width) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= int64_t(rows) * width) return;
  const int64_t row = i / width, column = i % width;
  out[i] = activated[i] * gate_up[row * 2 * width + width + column];
}

// 2. Both in one: activation(gate) never leaves its register.
__global__ void fused(const float* gate_up, float* out, int rows, int width) {
  const int64_t count = int64_t(rows) * width, stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    const int64_t row = i / width, column = i % width;
    const float* gate = gate_up + row * 2 * width;
    const float* up = gate + width;
    out[i] = silu(gate[column]) * up[column];
  }
}

// 3. The same, 16 bytes at a time. width is a multiple of 4.
__global__ void vectorised(const float* gate_up, float* out, int rows, int width) {
  const int64_t per_row = width / 4, count = rows * per_row, stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    const int64_t row = i / per_row, column = i % per_row;
    const float4* gate = reinterpret_cast<const float4*>(gate_up + row * 2 * width);
    const float4 g = gate[column], u = gate[per_row + column];
    reinterpret_cast<float4*>(out)[i] = {silu(g.x) * u.x, silu(g.y) * u.y, silu(g.z) * u.z, silu(g.w) * u.w};
  }
}

// Runs version 1, 2 or 3 on host arrays; *ms is the time of its fastest run.
extern "C" const char* act_mul(int version, const float* gate_up, float* out, int rows, int width, float* ms) {
  return report([&] {
    if (width % 4 != 0) throw std::runtime_error("width must be a multiple of 4");
    const size_t n = size_t(rows) * width;
    const DeviceArray<float> input(gate_up, 2 * n), activated(n), result(out, n);
    const auto blocks_for = [](size_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); };
    *ms = milliseconds_of([&] {
      if (version == 1) {
        launch(activate, blocks_for(n), kThreads, input.get(), activated.get(), rows, width);
        launch(multiply, blocks_for(n), kThreads, input.get(), activated.get(), result.get(), rows, width);
      } else if (version == 2) {
        launch(fused, blocks_for(n), kThreads, input.get(), result.get(), rows, width);
      } else {
        launch(vectorised, blocks_for(n / 4), kThreads, input.get(), result.get(), rows, width);
      }
    });
    result.copy_to(out);
  });
}

// Wrong for more than one row: the result is written over the input, which "is not needed any more".
extern "C" const char* act_mul_in_place(const float* gate_up, float* out, int rows, int width, int blocks) {
  return report([&] {
    const size_t n = size_t(rows) * width;
    const DeviceArray<float> memory(gate_up, 2 * n);
    launch(fused, blocks, kThreads, memory.get(), memory.get(), rows, width);
    std::vector<float> all(2 * n);
    memory.copy_to(all.data());
    std::copy(all.begin(), all.begin() + n, out);
  });
}
