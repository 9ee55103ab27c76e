// Which backends exist: the one place that names them.
#include "backend/backend.h"
#include "backend/cuda_devices.h"
#include "cpu/cpu_backend.h"

namespace tiny_vllm {

std::unique_ptr<Backend> make_backend(const BackendOptions& options) {
  if (options.num_threads < 0) {
    throw InvalidRequestError(str("num_threads is ", options.num_threads, "; it must be 0 (all CPUs) or more"));
  }
  if (options.device == "cuda") return make_cuda_backend(options);
  if (options.device == "auto") {
    const CudaDevices found = cuda_devices();
    if (!found.devices.empty()) return make_cuda_backend(options);
    if (options.profile)
      throw DeviceError(str("profile times the kernels of a GPU, and there is none: ", found.why_none));
    return make_cpu_backend(options);
  }
  if (options.device == "cpu") {
    if (options.profile) throw InvalidRequestError("profile times the kernels of a GPU; device is 'cpu', not 'cuda'");
    return make_cpu_backend(options);
  }
  throw DeviceError(str("device is '", options.device, "'; it must be auto, cpu or cuda"));
}

}  // namespace tiny_vllm
