// Which GPUs the CUDA backend could use, or why there are none. Defined in cuda/, or in no_cuda.cpp without it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tiny_vllm {

struct CudaDevice {
  int index = 0;
  std::string name;
  int compute_capability = 0;  // 90 for 9.0
  int64_t memory_bytes = 0;
  int num_multiprocessors = 0;
};

struct CudaDevices {
  std::vector<CudaDevice> devices;
  std::string why_none;  // one sentence; "" when there are devices
};

// Asks the driver, each time it is called and never before: importing tiny_vllm must not start CUDA, because a process
// that forks after CUDA has started cannot use it in the child.
CudaDevices cuda_devices();

}  // namespace tiny_vllm
