// Exercise 10.1: the weighted mean of values, while they come in.
//
// The test calls start() once, add() for each key, and finish() at the end; nobody shows you a score twice. The
// result is
//
//   out (dim) = sum of weight_j · value_j,   weights = softmax of all scores
//
// Scores may be of any size, 100,000 and -100,000 too. A score of -infinity is a hidden key: its value must leave no
// trace, even if it is NaN, and keys may be hidden at the beginning. If all are hidden, or none came, the result is
// zeros. A score that is NaN must make the result NaN: something is broken, and somebody should see it.
//
// Between the calls there is nothing but state.max, state.sum and out.
#include "simt.h"

struct State {
  float max, sum;
};

static void start(State& state, float* out, int dim) {
  // Your turn.
}

static void add(State& state, float* out, float score, const float* value, int dim) {
  // Your turn.
}

static void finish(State& state, float* out, int dim) {
  // Your turn.
}

// What the test calls.
extern "C" const char* begin_row(State* state, float* out, int dim) {
  return report([&] { start(*state, out, dim); });
}
extern "C" const char* add_key(State* state, float* out, float score, const float* value, int dim) {
  return report([&] { add(*state, out, score, value, dim); });
}
extern "C" const char* end_row(State* state, float* out, int dim) {
  return report([&] { finish(*state, out, dim); });
}
