#include "cuda_check.h"

#include <cstring>

#include "base/error.h"

namespace tiny_vllm {
namespace {

const char* hint_for(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "; another process may hold the GPU's memory (nvidia-smi shows it), or lower gpu_memory_utilization";
    case cudaErrorNoKernelImageForDevice:
      return "; this build has no code for this GPU: build again with CUDAARCHS set to its architecture";
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorAssert:
      return "; an earlier kernel is at fault and this process cannot use the GPU any more: run it again under "
             "CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer to see which";
    case cudaErrorDevicesUnavailable:
      return "; the GPU is in use by another process in exclusive mode";
    default:
      return "";
  }
}

}  // namespace

void throw_cuda_error(cudaError_t error, const char* call, std::source_location where) {
  cudaGetLastError();  // an error that is not sticky must not be reported a second time, by the next launch
  const char* file = std::strrchr(where.file_name(), '/');
  const std::string text = str(call, " failed with ", cudaGetErrorName(error), " (", cudaGetErrorString(error), ") at ",
                               file ? file + 1 : where.file_name(), ":", where.line(), hint_for(error));
  if (error == cudaErrorMemoryAllocation) throw OutOfMemoryError(text);
  throw DeviceError(text);
}

}  // namespace tiny_vllm
