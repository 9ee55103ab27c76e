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
#include <vector>

extern "C" const char* paged_attention(const float* query, const float* keys, const float* values, const int* tables,
                                       const int* context_len, float* out, int requests, int heads, int kv_heads,
                                       int dim, int /*num_blocks*/, int block_size, int width) {
  std::vector<float> acc(dim);
  for (int64_t r = 0; r < requests; ++r) {
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t kv_head = head / (heads / kv_heads);
      const float* q = query + (r * heads + head) * dim;
      float max = -INFINITY, sum = 0;
      acc.assign(dim, 0);
      for (int p = 0; p < context_len[r]; ++p) {
        const int64_t block = tables[r * width + p / block_size];
        const int64_t row = (block * kv_heads + kv_head) * block_size + p % block_size;
        float score = 0;
        for (int d = 0; d < dim; ++d) score += q[d] * keys[row * dim + d];
        score /= std::sqrt(static_cast<float>(dim));
        const float larger = std::fmax(max, score), factor = std::exp(max - larger), weight = std::exp(score - larger);
        max = larger;
        sum = sum * factor + weight;
        for (int d = 0; d < dim; ++d) acc[d] = acc[d] * factor + weight * values[row * dim + d];
      }
      for (int d = 0; d < dim; ++d) out[(r * heads + head) * dim + d] = sum == 0 ? 0 : acc[d] / sum;
    }
  }
  return nullptr;  // all went well
}
