// Exercise 18.1: decode attention through block tables, as a CUDA kernel.
//
//   query        (R, H, Dh)        one token of each request
//   keys, values (NB, Hk, BS, Dh)  the paged cache
//   tables       (R, B)            block numbers; what is behind a request's last block means nothing
//   context_len  (R)               keys that the request sees, from position 0 on; 0: none, and its result is zeros
//   out          (R, H, Dh)        softmax(query · keysᵀ / sqrt(Dh)) · values
//
// H is a multiple of Hk, and query head h reads KV head h / (H / Hk). Dh is a multiple of 32, at most 128. BS is
// anything from 1 on. Places that no position of a request is in may hold anything, NaN too.
//
// Scores may be so large that e^score overflows (chapter 10).
#include "simt.h"

constexpr int kWarps = 4, kMost = 4;  // warps of a block; numbers of a row that a lane holds, at most

__device__ float warp_sum(float value) {
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffff, value, mask);
  return value;
}

// A block of 128 threads for each request and query head: blockIdx.x is the request, blockIdx.y the query head.
__global__ void paged_attention_kernel(const float* query, const float* keys, const float* values, const int* tables,
                                       const int* context_len, float* out, int heads, int kv_heads, int dim,
                                       int block_size, int width) {
  __shared__ float maxes[kWarps], sums[kWarps], outs[kWarps][kMost * 32];
  const int request = blockIdx.x, head = blockIdx.y, kv_head = head / (heads / kv_heads);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, each = dim / 32;
  query += (int64_t(request) * heads + head) * dim;
  out += (int64_t(request) * heads + head) * dim;
  tables += int64_t(request) * width;

  // Each warp takes every fourth key, and a lane every 32nd number of it.
  float max = -INFINITY, sum = 0, acc[kMost] = {};
  for (int p = warp; p < context_len[request]; p += kWarps) {
    const int64_t row = (int64_t(tables[p / block_size]) * kv_heads + kv_head) * block_size + p % block_size;
    float score = 0;
    for (int e = 0; e < each; ++e) score += query[lane + 32 * e] * keys[row * dim + lane + 32 * e];
    score = warp_sum(score) / sqrtf(dim);
    const float larger = fmaxf(max, score), factor = expf(max - larger), weight = expf(score - larger);
    max = larger;
    sum = sum * factor + weight;
    for (int e = 0; e < each; ++e) acc[e] = acc[e] * factor + weight * values[row * dim + lane + 32 * e];
  }

  if (lane == 0) maxes[warp] = max, sums[warp] = sum;
  for (int e = 0; e < each; ++e) outs[warp][lane + 32 * e] = acc[e];
  __syncthreads();
  for (int d = threadIdx.x; d < dim; d += blockDim.x) {
    float largest = -INFINITY, total = 0, result = 0;
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, maxes[w]);
    for (int w = 0; w < kWarps; ++w) {
      if (sums[w] == 0) continue;  // it saw no key: e^(-inf + inf) would be NaN
      total += expf(maxes[w] - largest) * sums[w];
      result += expf(maxes[w] - largest) * outs[w][d];
    }
    out[d] = total == 0 ? 0 : result / total;
  }
}

// What the test calls.
extern "C" const char* paged_attention(const float* query, const float* keys, const float* values, const int* tables,
                                       const int* context_len, float* out, int requests, int heads, int kv_heads,
                                       int dim, int num_blocks, int block_size, int width) {
  return report([&] {
    const size_t cache = size_t(num_blocks) * kv_heads * block_size * dim, rows = size_t(requests) * heads * dim;
    const DeviceArray<float> q(query, rows), k(keys, cache), v(values, cache), result(out, rows);
    const DeviceArray<int> t(tables, size_t(requests) * width), c(context_len, requests);
    launch(paged_attention_kernel, dim3(requests, heads), 128, q.get(), k.get(), v.get(), t.get(), c.get(),
           result.get(), heads, kv_heads, dim, block_size, width);
    result.copy_to(out);
  });
}
