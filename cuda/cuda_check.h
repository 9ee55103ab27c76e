// Every CUDA call, kernel launch and cuBLAS status passes through here, always: a failure becomes a DeviceError that
// names the call, its place in the source and, where we know one, what to do.
#pragma once

#include <cuda_runtime.h>

#include <source_location>
#include <string>

namespace tiny_vllm {

void throw_cuda_error(cudaError_t error, const char* call, std::source_location where);

inline void check_cuda(cudaError_t error, const char* call,
                       std::source_location where = std::source_location::current()) {
  if (error != cudaSuccess) [[unlikely]]
    throw_cuda_error(error, call, where);
}

}  // namespace tiny_vllm

// TV_CUDA(cudaMemsetAsync(...)): throws when the call fails.
#define TV_CUDA(...) ::tiny_vllm::check_cuda((__VA_ARGS__), #__VA_ARGS__)
