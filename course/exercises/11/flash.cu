// Exercise 11.1: attention of one head in tiles, with an online softmax.
//
//   q (rows, 64)       the last `rows` tokens of the context: row i stands at position context - rows + i
//   k, v (room, 64)    the first `context` of them are there; what comes after may be anything, NaN too
//   out (rows, 64)     causal attention; scores are q·k / 8
//
// A block of 256 threads has 16 queries; thread t is one of 16 that work on row t / 16. Bring keys and values into
// shared memory, 16 at a time, and never store a score in global memory. Do not visit a tile that is hidden from all 16
// rows: each block reports how many it has visited.
#include "simt.h"

constexpr int kDim = 64;
constexpr int kTile = 16;  // queries of a block, and keys of a tile

__global__ void flash_kernel(const float* q, const float* k, const float* v, float* out, int* visited, int rows,
                             int context) {
  // Your turn. Queries blockIdx.x * 16 and up; visited[blockIdx.x] is the number of tiles. Shared memory is declared
  // with
  //   __shared__ float queries[kTile][kDim], keys[kTile][kDim + 1], values[kTile][kDim], weights[kTile][kTile];
}

// What the test calls.
extern "C" const char* flash(const float* q, const float* k, const float* v, float* out, int* visited, int rows,
                             int context, int room) {
  return report([&] {
    const DeviceArray<float> dq(q, size_t(rows) * kDim), dk(k, size_t(room) * kDim), dv(v, size_t(room) * kDim);
    const DeviceArray<float> result(out, size_t(rows) * kDim);
    const unsigned blocks = (rows + kTile - 1) / kTile;
    const DeviceArray<int> counts(visited, blocks);
    launch(flash_kernel, blocks, kTile * 16, dq.get(), dk.get(), dv.get(), result.get(), counts.get(), rows, context);
    result.copy_to(out);
    counts.copy_to(visited);
  });
}
