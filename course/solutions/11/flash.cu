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

// Over the 16 threads that work on a row.
__device__ float row_max(float value) {
  for (int mask = 8; mask > 0; mask /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, mask));
  return value;
}
__device__ float row_sum(float value) {
  for (int mask = 8; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffff, value, mask);
  return value;
}

__global__ void flash_kernel(const float* q, const float* k, const float* v, float* out, int* visited, int rows,
                             int context) {
  __shared__ float queries[kTile][kDim], keys[kTile][kDim + 1], values[kTile][kDim], weights[kTile][kTile];
  const int t = threadIdx.x, r = t / 16, c = t % 16, row = blockIdx.x * kTile + r;
  const int first_position = context - rows, position = first_position + row;
  const int last_row = min(rows, int(blockIdx.x + 1) * kTile) - 1;
  const int end = first_position + last_row + 1;  // what the last row sees; never above context

  for (int i = c; i < kDim; i += 16) queries[r][i] = row < rows ? q[int64_t(row) * kDim + i] : 0.0f;
  float largest = -INFINITY, sum = 0, mean[kDim / 16] = {};
  int tiles = 0;
  for (int begin = 0; begin < end; begin += kTile, ++tiles) {
    __syncthreads();                      // nobody works on the tile before any more
    for (int i = c; i < kDim; i += 16) {  // row r of the tile
      const bool there = begin + r < context;
      keys[r][i] = there ? k[int64_t(begin + r) * kDim + i] : 0.0f;
      values[r][i] = there ? v[int64_t(begin + r) * kDim + i] : 0.0f;
    }
    __syncthreads();

    float score = 0;
    for (int i = 0; i < kDim; ++i) score += queries[r][i] * keys[c][i];
    score = begin + c <= position ? score / 8 : -INFINITY;

    const float now = fmaxf(largest, row_max(score));  // key 0 is visible: finite from the first tile on
    const float factor = expf(largest - now);
    largest = now;
    weights[r][c] = expf(score - now);
    sum = sum * factor + weights[r][c];
    __syncwarp();
    for (int i = 0; i < kDim / 16; ++i) {
      mean[i] *= factor;
      for (int j = 0; j < kTile; ++j) mean[i] += weights[r][j] * values[j][c + 16 * i];
    }
  }

  if (t == 0) visited[blockIdx.x] = tiles;
  sum = row_sum(sum);
  if (row >= rows) return;
  for (int i = 0; i < kDim / 16; ++i) out[int64_t(row) * kDim + c + 16 * i] = mean[i] / sum;
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
