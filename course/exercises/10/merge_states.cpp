// Exercise 10.2: two states become one.
//
// Some keys were seen by one thread, others by another. Of each part there is the largest score, the sum of
// e^(score - max), and the sum of e^(score - max) · value, which is not divided yet. Take b into a, so that a is what
// one thread would have found that saw all keys.
//
// A part without a key, or with hidden keys only, is {-infinity, 0, zeros}. Taking it in must not change a bit of the
// other, whichever side it is on; two of them give another one.
#include "simt.h"

struct State {
  float max, sum;
};

static void merge(State& a, float* a_out, const State& b, const float* b_out, int dim) {
  // Your turn.
}

// What the test calls.
extern "C" const char* merge_states(State* a, float* a_out, const State* b, const float* b_out, int dim) {
  return report([&] { merge(*a, a_out, *b, b_out, dim); });
}
