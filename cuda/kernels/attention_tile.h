// What prefill and decode attention share: tiles of keys and values in shared memory, and the online softmax.
//
// A tile is some keys × DP elements of bfloat16, DP = Dh padded with zeros to a size that was compiled. Chunks of 16
// bytes are stored at position (chunk ^ row % 8) of their row: eight rows of one column then lie in eight different
// groups of banks, and ldmatrix reads them in one go.
#pragma once

#include "backend/backend.h"
#include "kernels/device.h"
#include "kernels/tensor_core.h"

namespace tiny_vllm {

constexpr float kLog2E = 1.44269504f;  // e^x = 2^(x · log2 e), and 2^x is one instruction

// Byte offset of a 16-byte chunk in a tile whose rows are DP elements.
template <int DP>
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
  return static_cast<uint32_t>(row * DP * 2 + ((chunk ^ (row & 7)) * 16));
}

// Where the keys of a request's position lie, in elements of one layer's cache.
struct PageTable {
  const int32_t* blocks;  // this request's row of block_tables
  int block_size, head_dim;
  int64_t head_stride;   // elements of one head in one block
  int64_t block_stride;  // elements of one block
  int64_t head_offset;

  __device__ PageTable(const int32_t* row, const AttentionShape& s, int kv_head)
      : blocks(row),
        block_size(static_cast<int>(s.block_size)),
        head_dim(static_cast<int>(s.head_dim)),
        head_stride(s.block_size * s.head_dim),
        block_stride(head_stride * s.num_kv_heads),
        head_offset(head_stride * kv_head) {}

  __device__ int64_t offset(int position) const {
    const int block = position / block_size;
    return blocks[block] * block_stride + head_offset + static_cast<int64_t>(position - block * block_size) * head_dim;
  }
};

// Which query rows of a prefill a block of threads works on.
struct Rows {
  int request, first, count;  // first row of the tile, and all rows of the request
};

// Request r owns the tiles from query_start[r] · G / ROWS + r on: never fewer than it needs, and no list has to be made
// on the host. count is 0 for a tile too many.
__device__ inline Rows rows_of(const int32_t* query_start, int num_requests, int group, int rows_per_tile, int tile) {
  const auto first_tile = [&](int r) {
    return static_cast<int>(static_cast<int64_t>(query_start[r]) * group / rows_per_tile) + r;
  };
  int low = 0, high = num_requests - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_tile(middle) <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int count = (query_start[low + 1] - query_start[low]) * group;
  const int tiles = (count + rows_per_tile - 1) / rows_per_tile, mine = tile - first_tile(low);
  // The last tiles of a request see the most keys: they go first.
  return mine < tiles ? Rows{low, (tiles - 1 - mine) * rows_per_tile, count} : Rows{low, 0, 0};
}

// The two rows g and g + 8 of a 16-row tile that a lane works on: their largest score and the sum of e^(score - max),
// as in cpp/cpu/online_softmax.h. Scores are in units of log2 here. `sum` is the lane's own part until it is reduced.
struct OnlineSoftmax {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};

  // Turns the scores of a tile into weights, in place, and returns in `factor` what the output so far must be
  // multiplied by. N tiles of 16 × 8.
  template <int N>
  __device__ void update(float (&scores)[N][4], float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = max[r];
#pragma unroll
      for (int n = 0; n < N; ++n) largest = fmaxf(largest, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const float shift = largest == -INFINITY ? 0.0f : largest;  // all masked so far: e^(-inf - 0) is the 0 we want
      factor[r] = exp2f(max[r] - shift);
      max[r] = largest;
      sum[r] *= factor[r];
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          scores[n][i] = exp2f(scores[n][i] - shift);
          sum[r] += scores[n][i];
        }
      }
    }
  }

  __device__ void reduce() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
  }
};

// scores (16 × KEYS) = queries (16 × DP, as A fragments) · keysᵀ of a tile that starts at row `first`.
template <int DP, int KEYS>
__device__ __forceinline__ void scores_of_tile(const uint32_t (&q)[DP / 16][4], uint32_t keys, int lane,
                                               float (&scores)[KEYS / 8][4]) {
#pragma unroll
  for (int n = 0; n < KEYS / 8; ++n) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0;
#pragma unroll
  for (int k = 0; k < DP / 16; ++k) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; n += 2) {
      uint32_t b[4];  // keys n·8..n·8+7 with dims 16k and 16k+8, then keys of n + 1
      const int row = n * 8 + (lane / 16) * 8 + lane % 8, chunk = 2 * k + (lane / 8) % 2;
      ldmatrix(b, keys + chunk_offset<DP>(row, chunk));
      mma(scores[n], q[k], b[0], b[1]);
      mma(scores[n + 1], q[k], b[2], b[3]);
    }
  }
}

// out (16 × DP) += weights (16 × KEYS) · values of a tile.
template <int DP, int KEYS>
__device__ __forceinline__ void add_values_of_tile(const float (&weights)[KEYS / 8][4], uint32_t values, int lane,
                                                   float (&out)[DP / 8][4]) {
#pragma unroll
  for (int k = 0; k < KEYS / 16; ++k) {
    const uint32_t a[4] = {pack(weights[2 * k][0], weights[2 * k][1]), pack(weights[2 * k][2], weights[2 * k][3]),
                           pack(weights[2 * k + 1][0], weights[2 * k + 1][1]),
                           pack(weights[2 * k + 1][2], weights[2 * k + 1][3])};
#pragma unroll
    for (int n = 0; n < DP / 8; n += 2) {
      uint32_t b[4];  // keys 16k..16k+15 with dims n·8.., then dims of n + 1
      const int row = 16 * k + lane % 16, chunk = n + lane / 16;
      ldmatrix_transposed(b, values + chunk_offset<DP>(row, chunk));
      mma(out[n], a, b[0], b[1]);
      mma(out[n + 1], a, b[2], b[3]);
    }
  }
}

}  // namespace tiny_vllm
