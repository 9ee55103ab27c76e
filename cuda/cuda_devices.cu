// Lists the GPUs. The CUDA runtime is linked statically and opens the driver by itself, on the first call: a machine
// without a driver can import tiny_vllm, and is told here why no GPU is used.
#include <cuda_runtime.h>

#include "backend/cuda_devices.h"
#include "base/error.h"

namespace tiny_vllm {
namespace {

std::string version_string(int version) { return str(version / 1000, ".", version % 1000 / 10); }

std::string explain(cudaError_t error) {
  int driver = 0;
  int runtime = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) runtime = 0;
  if (driver == 0) return "no NVIDIA driver was found on this machine";
  if (error == cudaErrorInsufficientDriver) {
    return str("the NVIDIA driver supports CUDA ", version_string(driver), ", and this build needs ",
               version_string(runtime), ": update the driver");
  }
  if (error == cudaErrorNoDevice) return "the NVIDIA driver shows no GPU (is CUDA_VISIBLE_DEVICES set?)";
  return str("cudaGetDeviceCount failed: ", cudaGetErrorName(error), ", ", cudaGetErrorString(error));
}

}  // namespace

CudaDevices cuda_devices() {
  CudaDevices found;
  int count = 0;
  if (cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    found.why_none = explain(error);
    return found;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    if (cudaError_t error = cudaGetDeviceProperties(&properties, i); error != cudaSuccess) {
      throw DeviceError(str("cudaGetDeviceProperties failed for GPU ", i, ": ", cudaGetErrorString(error)));
    }
    found.devices.push_back({i, properties.name, properties.major * 10 + properties.minor,
                             static_cast<int64_t>(properties.totalGlobalMem), properties.multiProcessorCount});
  }
  if (count == 0) found.why_none = explain(cudaErrorNoDevice);
  return found;
}

}  // namespace tiny_vllm
