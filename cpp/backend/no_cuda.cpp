// Stands in for cuda/ in a build without the CUDA backend.
#include "backend/cuda_devices.h"
#include "base/build_info.h"

namespace tiny_vllm {

CudaDevices cuda_devices() { return {{}, "this build of tiny_vllm has no CUDA backend: " + build_info().cuda_reason}; }

std::unique_ptr<Backend> make_cuda_backend(const BackendOptions&) {
  throw DeviceError("device 'cuda': " + cuda_devices().why_none);
}

}  // namespace tiny_vllm
