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

#include <cmath>
#include <cstdint>

extern "C" int32_t race(const float* logits, int32_t n, double temperature, uint64_t seed, int64_t position) {
  (void)logits, (void)n, (void)temperature, (void)seed, (void)position;
  return -1;  // Your turn.
}
