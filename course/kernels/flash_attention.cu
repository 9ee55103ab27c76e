// Attention of a prompt four times, one idea each, and once wrong: docs/course/11-flash-attention.md tells the story.
// The engine's are cuda/kernels/attention_prefill.cu and attention_prefill_hopper.cu.
//
//   q (H, T, 64), k and v (Hk, T, 64), rotated already -> out (H, T, 64), causal, in float32
//
// Compiles with nvcc, and with g++ for a CPU (simt.h): python -m tiny_vllm.course 11 does either.
#include "simt.h"

constexpr int kDim = 64;   // of a head
constexpr int kKeys = 16;  // of a tile: as many as threads work on one row
constexpr float kScale = 0.125f;

// 1. The definition in three kernels; scores (H, T, T) lie in memory in between.
__global__ void scores_kernel(const float* q, const float* k, float* scores, int tokens, int group) {
  const int key = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y, head = blockIdx.z;
  if (key >= tokens) return;
  q += (int64_t(head) * tokens + row) * kDim;
  k += (int64_t(head / group) * tokens + key) * kDim;
  float score = 0;
  for (int i = 0; i < kDim; ++i) score += q[i] * k[i];
  scores[(int64_t(head) * tokens + row) * tokens + key] = key <= row ? score * kScale : -INFINITY;
}

__global__ void softmax_kernel(float* scores, int rows, int tokens) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  scores += int64_t(row) * tokens;
  float largest = -INFINITY, sum = 0;
  for (int j = 0; j < tokens; ++j) largest = fmaxf(largest, scores[j]);
  for (int j = 0; j < tokens; ++j) sum += scores[j] = expf(scores[j] - largest);
  for (int j = 0; j < tokens; ++j) scores[j] /= sum;
}

__global__ void values_kernel(const float* weights, const float* v, float* out, int tokens, int group) {
  const int i = threadIdx.x, row = blockIdx.x, head = blockIdx.y;
  weights += (int64_t(head) * tokens + row) * tokens;
  v += int64_t(head / group) * tokens * kDim;
  float mean = 0;
  for (int j = 0; j < tokens; ++j) mean += weights[j] * v[j * kDim + i];
  out[(int64_t(head) * tokens + row) * kDim + i] = mean;
}

// The largest of the 16 threads that work on a row, which all of them get.
__device__ float row_max(float value) {
  for (int mask = 8; mask > 0; mask /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, mask));
  return value;
}
__device__ float row_sum(float value) {
  for (int mask = 8; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffff, value, mask);
  return value;
}

// Where the keys end that a tile of rows reads.
enum class End {
  kLastToken,  // 2. all keys, masked
  kLastRow,    // 3. and 4. what the last row sees: the tiles after it are hidden from all rows
  kFirstRow,   // 5. wrong: the tile in which the first row stands
};

// 2. to 5. A block has kRows queries. Tiles of keys and values pass by in shared memory, and of the scores nothing
// lasts but each row's largest and sum. Thread t is one of 16 that work on row t / 16.
template <int kRows, End kEnd>
__global__ void tiled(const float* q, const float* k, const float* v, float* out, int* visited, int tokens, int group) {
  __shared__ float queries[kRows][kDim], keys[kKeys][kDim + 1], values[kKeys][kDim], weights[kRows][kKeys];
  // The 65th number of a row of keys is never used: 16 threads that read one column would else meet in one bank.
  const int t = threadIdx.x, r = t / 16, c = t % 16, head = blockIdx.y;
  const int first_row = blockIdx.x * kRows, row = first_row + r;
  q += (int64_t(head) * tokens + first_row) * kDim;
  k += int64_t(head / group) * tokens * kDim;
  v += int64_t(head / group) * tokens * kDim;

  for (int i = t; i < kRows * kDim; i += kRows * 16)
    queries[i / kDim][i % kDim] = first_row + i / kDim < tokens ? q[i] : 0.0f;
  float largest = -INFINITY, sum = 0;  // sum: of this thread's keys only, until the end
  float mean[kDim / 16] = {};          // elements c, c + 16, c + 32, c + 48 of the row's result
  int end = tokens;
  if (kEnd == End::kLastRow) end = min(tokens, first_row + kRows);
  if (kEnd == End::kFirstRow) end = min(tokens, (first_row / kKeys + 1) * kKeys);

  for (int begin = 0; begin < end; begin += kKeys) {
    __syncthreads();  // all are done with the tile before, and the queries are there
    for (int i = t; i < kKeys * kDim; i += kRows * 16) {
      const bool there = begin + i / kDim < tokens;  // past the end may be anything, NaN too: 0 · NaN is NaN
      keys[i / kDim][i % kDim] = there ? k[begin * kDim + i] : 0.0f;
      values[i / kDim][i % kDim] = there ? v[begin * kDim + i] : 0.0f;
    }
    __syncthreads();

    float score = 0;  // of row r with key c of the tile
    for (int i = 0; i < kDim; ++i) score += queries[r][i] * keys[c][i];
    score = begin + c <= row ? score * kScale : -INFINITY;

    const float now = fmaxf(largest, row_max(score));  // chapter 10; key 0 is visible, so `now` is never -inf
    const float factor = expf(largest - now), weight = expf(score - now);
    largest = now;
    sum = sum * factor + weight;
    weights[r][c] = weight;
    __syncwarp();  // a row's 16 threads are in one warp
    for (int i = 0; i < kDim / 16; ++i) {
      mean[i] *= factor;
      for (int j = 0; j < kKeys; ++j) mean[i] += weights[r][j] * values[j][c + 16 * i];
    }
    if (t == 0) visited[head * gridDim.x + blockIdx.x] = begin / kKeys + 1;
  }

  sum = row_sum(sum);
  if (row >= tokens) return;
  for (int i = 0; i < kDim / 16; ++i) out[(int64_t(head) * tokens + row) * kDim + c + 16 * i] = mean[i] / sum;
}

// Runs version 1 ... 5 on host arrays. visited (H, tiles of rows): how many tiles of keys each block read; not by 1.
// *ms is the time of the fastest of `runs` runs.
extern "C" const char* flash_attention(int version, const float* q, const float* k, const float* v, float* out,
                                       int* visited, int heads, int kv_heads, int tokens, int runs, float* ms) {
  return report([&] {
    const size_t n = size_t(heads) * tokens * kDim, kv = size_t(kv_heads) * tokens * kDim;
    const DeviceArray<float> dq(q, n), dk(k, kv), dv(v, kv), result(out, n);
    const int group = heads / kv_heads, rows = version <= 3 ? 16 : 32, tiles = (tokens + rows - 1) / rows;
    if (version == 1) {
      const DeviceArray<float> scores(size_t(heads) * tokens * tokens);
      const auto work = [&] {
        launch(scores_kernel, dim3((tokens + 127) / 128, tokens, heads), 128, dq.get(), dk.get(), scores.get(), tokens,
               group);
        launch(softmax_kernel, (heads * tokens + 127) / 128, 128, scores.get(), heads * tokens, tokens);
        launch(values_kernel, dim3(tokens, heads), kDim, scores.get(), dv.get(), result.get(), tokens, group);
      };
      *ms = milliseconds_of(work, runs);
    } else {
      void (*const kernels[])(const float*, const float*, const float*, float*, int*, int, int) = {
          tiled<16, End::kLastToken>, tiled<16, End::kLastRow>, tiled<32, End::kLastRow>, tiled<32, End::kFirstRow>};
      const DeviceArray<int> dvisited(size_t(heads) * tiles);
      const auto work = [&] {
        launch(kernels[version - 2], dim3(tiles, heads), rows * 16, dq.get(), dk.get(), dv.get(), result.get(),
               dvisited.get(), tokens, group);
      };
      *ms = milliseconds_of(work, runs);
      dvisited.copy_to(visited);
    }
    result.copy_to(out);
  });
}
