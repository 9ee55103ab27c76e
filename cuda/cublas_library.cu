#include "cublas_library.h"

#include <dlfcn.h>

#include <cstring>
#include <string>

#include "base/error.h"

namespace tiny_vllm {
namespace {

#define TV_TEXT_OF(x) #x
#define TV_TEXT(x) TV_TEXT_OF(x)
#define TV_VERSION TV_TEXT(CUBLAS_VER_MAJOR)

// The dynamic linker finds a system's cuBLAS, and one that this process has loaded already: Python loads the one of the
// nvidia-cublas package when that is installed (tiny_vllm/cuda_libraries.py).
class Opened {
 public:
  explicit Opened(const char* name) : name_(name), handle_(dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
    if (!handle_)
      throw DeviceError(str("the CUDA backend needs ", name, ", which was not found: install the CUDA ", TV_VERSION,
                            " toolkit or `pip install nvidia-cublas` (", dlerror(), ")"));
  }

  template <typename F>
  void find(F& function, const char* symbol) const {
    function = reinterpret_cast<F>(dlsym(handle_, symbol));
    if (!function) throw DeviceError(str(name_, " has no function ", symbol, ": it is not NVIDIA's"));
  }

 private:
  const char* name_;
  void* handle_;  // stays open: the process uses it to its end
};

CublasLibrary open_library() {
  CublasLibrary l;
  const Opened cublas("libcublas.so." TV_VERSION), lt("libcublasLt.so." TV_VERSION);
  cublas.find(l.create, "cublasCreate_v2");
  cublas.find(l.destroy, "cublasDestroy_v2");
  cublas.find(l.set_stream, "cublasSetStream_v2");
  cublas.find(l.set_workspace, "cublasSetWorkspace_v2");
  cublas.find(l.set_math_mode, "cublasSetMathMode");
  cublas.find(l.gemm_ex, "cublasGemmEx");
  cublas.find(l.get_status_name, "cublasGetStatusName");
  cublas.find(l.get_status_string, "cublasGetStatusString");
  lt.find(l.lt_create, "cublasLtCreate");
  lt.find(l.lt_destroy, "cublasLtDestroy");
  lt.find(l.lt_desc_create, "cublasLtMatmulDescCreate");
  lt.find(l.lt_desc_destroy, "cublasLtMatmulDescDestroy");
  lt.find(l.lt_desc_set, "cublasLtMatmulDescSetAttribute");
  lt.find(l.lt_layout_create, "cublasLtMatrixLayoutCreate");
  lt.find(l.lt_layout_destroy, "cublasLtMatrixLayoutDestroy");
  lt.find(l.lt_preference_create, "cublasLtMatmulPreferenceCreate");
  lt.find(l.lt_preference_destroy, "cublasLtMatmulPreferenceDestroy");
  lt.find(l.lt_preference_set, "cublasLtMatmulPreferenceSetAttribute");
  lt.find(l.lt_heuristic, "cublasLtMatmulAlgoGetHeuristic");
  lt.find(l.lt_matmul, "cublasLtMatmul");
  return l;
}

}  // namespace

const CublasLibrary& cublas() {
  static const CublasLibrary library = open_library();
  return library;
}

void check_cublas(cublasStatus_t status, const char* call, std::source_location where) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const char* file = std::strrchr(where.file_name(), '/');
  const std::string text =
      str(call, " failed with ", cublas().get_status_name(status), " (", cublas().get_status_string(status), ") at ",
          file ? file + 1 : where.file_name(), ":", where.line());
  if (status == CUBLAS_STATUS_ALLOC_FAILED) throw OutOfMemoryError(text + "; lower gpu_memory_utilization");
  throw DeviceError(text);
}

}  // namespace tiny_vllm
