// Which backends exist: the one place that names them.
#include "backend/backend.h"
#include "backend/cuda_devices.h"
#include "cpu/cpu_backend.h"

namespace tiny_vllm {

std::unique_ptr<Backend> make_backend(const BackendOptions& options) {
  if (options.num_threads < 0) {
    throw InvalidRequestError(str("num_threads is ", options.num_threads, "; it must be 0 (all CPUs) or more"));
  }
  if (options.device == "cpu") return make_cpu_backend(options);
  if (options.device == "cuda") return make_cuda_backend(options);
  if (options.device == "auto") {
    return cuda_devices().devices.empty() ? make_cpu_backend(options) : make_cuda_backend(options);
  }
  throw DeviceError(str("device is '", options.device, "'; it must be auto, cpu or cuda"));
}

}  // namespace tiny_vllm
