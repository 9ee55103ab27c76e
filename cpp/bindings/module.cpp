// The module tiny_vllm._core: the exceptions, what the build and the machine are, and the parts of bindings.h.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include "backend/cuda_devices.h"
#include "base/build_info.h"
#include "base/error.h"
#include "bindings/bindings.h"

namespace py = pybind11;

namespace tiny_vllm {
namespace {

// The classes are Python's (python/tiny_vllm/errors.py), so that they pickle and carry docstrings. They are looked up
// at the moment of raising: errors are rare, and nothing has to be kept alive here.
void raise_python(const char* class_name, const std::exception& error) {
  const py::object type = py::module_::import("tiny_vllm.errors").attr(class_name);
  py::set_error(type, error.what());
}

void translate(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (const ModelLoadError& e) {
    raise_python("ModelLoadError", e);
  } catch (const InvalidRequestError& e) {
    raise_python("InvalidRequestError", e);
  } catch (const OutOfMemoryError& e) {
    raise_python("OutOfMemoryError", e);
  } catch (const DeviceError& e) {
    raise_python("DeviceError", e);
  } catch (const InternalError& e) {
    raise_python("InternalError", e);
  } catch (const Error& e) {
    raise_python("Error", e);
  }
}

py::typing::Dict<py::str, py::object> build_info_dict() {
  const BuildInfo& info = build_info();
  py::typing::Dict<py::str, py::object> d;
  d["version"] = info.version;
  d["compiler"] = info.compiler;
  d["flags"] = info.flags;
  d["build_type"] = info.build_type;
  d["target"] = info.target;
  d["instruction_sets"] = info.instruction_sets;
  d["cuda"] = info.cuda;
  d["cuda_reason"] = info.cuda_reason;
  d["cuda_version"] = info.cuda_version;
  d["cuda_architectures"] = info.cuda_architectures;
  return d;
}

void bind_machine(py::module_& m) {
  m.def("build_info", &build_info_dict,
        "How this binary was made: version, compiler, flags, build_type, target, instruction_sets (of the CPU kernels "
        "compiled in), cuda, cuda_reason, cuda_version, cuda_architectures.");

  py::class_<CudaDevice>(m, "CudaDevice", "A GPU that the CUDA driver shows.")
      .def_readonly("index", &CudaDevice::index)
      .def_readonly("name", &CudaDevice::name)
      .def_readonly("compute_capability", &CudaDevice::compute_capability, "90 for 9.0")
      .def_readonly("memory_bytes", &CudaDevice::memory_bytes)
      .def_readonly("num_multiprocessors", &CudaDevice::num_multiprocessors);

  m.def(
      "cuda_devices",
      [] {
        CudaDevices found = cuda_devices();
        return std::pair(std::move(found.devices), std::move(found.why_none));
      },
      py::call_guard<py::gil_scoped_release>(),
      "The GPUs, and one sentence that says why there are none (\"\" when there are). The first call starts CUDA.");
}

}  // namespace
}  // namespace tiny_vllm

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ half of tiny_vllm. Private: use what the package tiny_vllm exports.";
  py::register_local_exception_translator(&tiny_vllm::translate);
  tiny_vllm::bind_machine(m);
  tiny_vllm::bind_ops(m);
  tiny_vllm::bind_kv(m);
  tiny_vllm::bind_safetensors(m);
  tiny_vllm::bind_engine(m);
}
