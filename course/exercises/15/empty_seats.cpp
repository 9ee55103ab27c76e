// Exercise 15.3: what static batching costs, without running it.
//
// `lengths` are the tokens of n answers, in the order in which they arrive; all are at least 1. All prompts are short:
// a batch computes its prompts in one step, which brings the first token of each answer, and then each step brings one
// more token to each answer that has not ended.
//
//   steps(lengths, n, seats)         steps until all answers are there
//   empty_seats(lengths, n, seats)   seats that nobody used, added up over all steps; also those that the last batch
//                                    could not fill
//   sorted_steps(lengths, n, seats)  steps if the answers had come sorted, the shortest first; `lengths` is not changed
#include <cstdint>

extern "C" int64_t steps(const int32_t* lengths, int32_t n, int32_t seats) {
  (void)lengths, (void)n, (void)seats;
  return -1;  // Your turn.
}

extern "C" int64_t empty_seats(const int32_t* lengths, int32_t n, int32_t seats) {
  (void)lengths, (void)n, (void)seats;
  return -1;  // Your turn.
}

extern "C" int64_t sorted_steps(const int32_t* lengths, int32_t n, int32_t seats) {
  (void)lengths, (void)n, (void)seats;
  return -1;  // Your turn.
}
