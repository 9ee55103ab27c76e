// Exercise 9.1: causal attention of one prompt, as its definition reads.
//
//   qkv (rows, (heads + 2 kv_heads) · dim)   of each token: all queries, then all keys, then all values
//   out (rows, heads · dim)                  of each token and query head: the weighted mean of the values
//
// Queries and keys are rotated already. Query head h reads key head h / (heads / kv_heads). The score is q·k /
// sqrt(dim); a token sees itself and those before it. Scores are small here: e^score does not overflow. (Chapter 10
// does away with that.)
#include "simt.h"

static void attend(const float* qkv, int rows, int heads, int kv_heads, int dim, float* out) {
  // Your turn.
}

// What the test calls.
extern "C" const char* attention(const float* qkv, int rows, int heads, int kv_heads, int dim, float* out) {
  return report([&] { attend(qkv, rows, heads, kv_heads, dim, out); });
}
