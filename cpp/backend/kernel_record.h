// What a profile (BackendOptions::profile) says of one kernel that ran.
#pragma once

#include <cstdint>
#include <string>

namespace tiny_vllm {

struct KernelRecord {
  std::string name;
  int64_t step = 0;        // of the backend's life, from 1; a step begins when its batch is uploaded
  int64_t tokens = 0;      // of that step
  double start_us = 0;     // microseconds after the first kernel's start. Kernels do not overlap.
  double duration_us = 0;  // with its start on the GPU, about a microsecond
  int64_t bytes = 0;       // that it must move, by its formula; 0: it has none
  int64_t flops = 0;       // that it must do; 0: hardly any, or it has no formula
};

}  // namespace tiny_vllm
