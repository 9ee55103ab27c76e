// The door to cuda/: which GPUs there are, and the backend. Defined there, or in no_cuda.cpp for a build without it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"

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

// The current GPU. Throws DeviceError, which says why, when it cannot be used.
std::unique_ptr<Backend> make_cuda_backend(const BackendOptions& options);

}  // namespace tiny_vllm
