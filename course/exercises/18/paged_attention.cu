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

// A block of 128 threads for each request and query head: blockIdx.x is the request, blockIdx.y the query head.
__global__ void paged_attention_kernel(const float* query, const float* keys, const float* values, const int* tables,
                                       const int* context_len, float* out, int heads, int kv_heads, int dim,
                                       int block_size, int width) {
  // Your turn.
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
