// The module tiny_vllm._core: the exceptions, the build description, and the parts that bindings.h lists.
#include <pybind11/pybind11.h>

#include "base/error.h"
#include "bindings/bindings.h"

namespace py = pybind11;

namespace tiny_vllm {
namespace {

// Python's own classes (python/tiny_vllm/errors.py), so that they pickle, carry docstrings and can be caught
// without loading this module. Looked up at the moment of raising: errors are rare, and nothing is kept alive here.
void raise_python(const char* class_name, const std::exception& error) {
  py::object type = py::module_::import("tiny_vllm.errors").attr(class_name);
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

}  // namespace
}  // namespace tiny_vllm

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ half of tiny_vllm. Private: use the classes that the package tiny_vllm exports.";
  py::register_local_exception_translator(&tiny_vllm::translate);
#ifdef TV_HAVE_BIND_OPS
  tiny_vllm::bind_ops(m);
#endif
#ifdef TV_HAVE_BIND_KV
  tiny_vllm::bind_kv(m);
#endif
#ifdef TV_HAVE_BIND_SAFETENSORS
  tiny_vllm::bind_safetensors(m);
#endif
#ifdef TV_HAVE_BIND_ENGINE
  tiny_vllm::bind_engine(m);
#endif
}
