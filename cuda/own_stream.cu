#include "own_stream.h"

#include <algorithm>
#include <string>

#include "base/build_info.h"
#include "base/error.h"

namespace tiny_vllm {
namespace {

__global__ void probe_kernel() {}

}  // namespace

OwnStream::OwnStream(bool profile) {
  TV_CUDA(cudaGetDevice(&device_));
  TV_CUDA(cudaGetDeviceProperties(&properties_, device_));
  const auto& built = build_info().cuda_architectures;
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, probe_kernel);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();
    std::string list;
    for (const std::string& arch : built) list += (list.empty() ? "" : ", ") + arch;
    throw DeviceError(str("this build has code for compute capabilities ", list, ", and ", properties_.name, " has ",
                          properties_.major, properties_.minor, ": build again with CUDAARCHS=", properties_.major,
                          properties_.minor));
  }
  check_cuda(error, "cudaFuncGetAttributes(&attributes, probe_kernel)");
  stream_.num_sms = properties_.multiProcessorCount;
  // Kernels wait for their predecessors only in code made for compute capability 9.0 and newer (launch.h). What is made
  // from older PTX when the module is loaded has no wait, and must not be started early.
  stream_.dependent_launch = properties_.major >= 9 && attributes.ptxVersion >= 90 && !profile;
  stream_.has_wgmma =
      properties_.major == 9 && properties_.minor == 0 && std::find(built.begin(), built.end(), "90a") != built.end();
  if (profile) stream_.timer = &timer_.emplace();
  TV_CUDA(cudaStreamCreateWithFlags(&stream_.handle, cudaStreamNonBlocking));
}

}  // namespace tiny_vllm
