// Exercise 18.2: the same as 18.1, in C++ for a CPU. No threads, no blocks of threads: loops.
//
//   query        (R, H, Dh)        one token of each request
//   keys, values (NB, Hk, BS, Dh)  the paged cache
//   tables       (R, B)            block numbers; what is behind a request's last block means nothing
//   context_len  (R)               keys that the request sees, from position 0 on; 0: none, and its result is zeros
//   out          (R, H, Dh)        softmax(query · keysᵀ / sqrt(Dh)) · values
//
// H is a multiple of Hk, and query head h reads KV head h / (H / Hk). Dh and BS are anything from 1 on. Places that no
// position of a request is in may hold anything, NaN too.
//
// Scores may be so large that e^score overflows (chapter 10).
#include <cmath>
#include <cstdint>

extern "C" const char* paged_attention(const float* query, const float* keys, const float* values, const int* tables,
                                       const int* context_len, float* out, int requests, int heads, int kv_heads,
                                       int dim, int num_blocks, int block_size, int width) {
  // Your turn.
  return nullptr;  // all went well
}
