// What a device is told of a row, as the host's sampler takes it: for tests that compare the two.
#pragma once

#include "backend/step_batch.h"
#include "sample/sampling_params.h"

namespace tiny_vllm {

inline SamplingParams params_of(const SampleRow& row) {
  SamplingParams params;
  params.temperature = row.temperature;
  params.top_k = row.top_k;
  params.top_p = row.top_p;
  params.min_p = row.min_p;
  params.repetition_penalty = row.repetition_penalty;
  params.presence_penalty = row.presence_penalty;
  params.frequency_penalty = row.frequency_penalty;
  return params;
}

}  // namespace tiny_vllm
