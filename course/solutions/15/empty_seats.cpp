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

#include <algorithm>
#include <numeric>
#include <vector>

extern "C" int64_t steps(const int32_t* lengths, int32_t n, int32_t seats) {
  int64_t sum = 0;
  for (int32_t first = 0; first < n; first += seats)
    sum += *std::max_element(lengths + first, lengths + std::min(n, first + seats));  // all wait for the longest
  return sum;
}

extern "C" int64_t empty_seats(const int32_t* lengths, int32_t n, int32_t seats) {
  return steps(lengths, n, seats) * seats - std::accumulate(lengths, lengths + n, int64_t{0});
}

extern "C" int64_t sorted_steps(const int32_t* lengths, int32_t n, int32_t seats) {
  std::vector<int32_t> sorted(lengths, lengths + n);
  std::sort(sorted.begin(), sorted.end());
  return steps(sorted.data(), n, seats);
}
