// The parts of the Python module, one file each. Bindings translate and do nothing else.
#pragma once

#include <pybind11/pybind11.h>

namespace tiny_vllm {

void bind_ops(pybind11::module_& m);
void bind_kv(pybind11::module_& m);
void bind_safetensors(pybind11::module_& m);
void bind_engine(pybind11::module_& m);

}  // namespace tiny_vllm
