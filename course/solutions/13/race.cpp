// Exercise 13.2: the exponential race.
//
// race(logits, n, temperature, seed, position) returns the token that the engine draws: see Sampler::sample in
// cpp/sample/sampler.cpp, which you should not copy but understand.
//
// Token i has the weight exp((logits[i] - max) / temperature). Its random number u is uniform_open() of word i % 4 of
//
//   philox({i / 4, low 32 bits of position, high 32 bits of position, 0}, seed)
//
// and e = -log(u). The largest weight / e wins; among equals the lower id. Compute in double. n is not always a
// multiple of 4; a logit may be -infinity, but not all of them; temperature is above 0.
#include "../../../cpp/sample/philox.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

extern "C" int32_t race(const float* logits, int32_t n, double temperature, uint64_t seed, int64_t position) {
  const double max = *std::max_element(logits, logits + n);
  const auto where = static_cast<uint64_t>(position);
  double best = -1;
  int32_t winner = -1;
  tiny_vllm::PhiloxBlock block{};
  for (int32_t i = 0; i < n; ++i) {
    if (i % 4 == 0)
      block = tiny_vllm::philox(
          {static_cast<uint32_t>(i / 4), static_cast<uint32_t>(where), static_cast<uint32_t>(where >> 32), 0}, seed);
    const double e = -std::log(tiny_vllm::uniform_open(block[i % 4]));
    const double score = std::exp((logits[i] - max) / temperature) / e;
    if (score > best) {  // not >=: of equals the first stays
      best = score;
      winner = i;
    }
  }
  return winner;
}
