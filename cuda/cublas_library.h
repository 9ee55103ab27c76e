// cuBLAS, opened when the first CUDA backend is made and not when this module is imported: a machine without a GPU has
// no cuBLAS, and needs none.
#pragma once

#include <cublasLt.h>
#include <cublas_v2.h>

#include <source_location>

namespace tiny_vllm {

// The functions that gemm.cu calls, under their own names.
struct CublasLibrary {
  using GemmEx = cublasStatus_t(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                const void* alpha, const void* a, cudaDataType_t, int lda, const void* b,
                                cudaDataType_t, int ldb, const void* beta, void* c, cudaDataType_t, int ldc,
                                cublasComputeType_t, cublasGemmAlgo_t);
  decltype(&::cublasCreate_v2) create = nullptr;
  decltype(&::cublasDestroy_v2) destroy = nullptr;
  decltype(&::cublasSetStream_v2) set_stream = nullptr;
  decltype(&::cublasSetWorkspace_v2) set_workspace = nullptr;
  decltype(&::cublasSetMathMode) set_math_mode = nullptr;
  GemmEx* gemm_ex = nullptr;  // its type is written out: the header has a second one for C++
  decltype(&::cublasLtCreate) lt_create = nullptr;
  decltype(&::cublasLtDestroy) lt_destroy = nullptr;
  decltype(&::cublasLtMatmulDescCreate) lt_desc_create = nullptr;
  decltype(&::cublasLtMatmulDescDestroy) lt_desc_destroy = nullptr;
  decltype(&::cublasLtMatmulDescSetAttribute) lt_desc_set = nullptr;
  decltype(&::cublasLtMatrixLayoutCreate) lt_layout_create = nullptr;
  decltype(&::cublasLtMatrixLayoutDestroy) lt_layout_destroy = nullptr;
  decltype(&::cublasLtMatmulPreferenceCreate) lt_preference_create = nullptr;
  decltype(&::cublasLtMatmulPreferenceDestroy) lt_preference_destroy = nullptr;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) lt_preference_set = nullptr;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) lt_heuristic = nullptr;
  decltype(&::cublasLtMatmul) lt_matmul = nullptr;
  decltype(&::cublasGetStatusName) get_status_name = nullptr;
  decltype(&::cublasGetStatusString) get_status_string = nullptr;
};

// Throws DeviceError when there is no cuBLAS of the version that this was built with.
const CublasLibrary& cublas();

void check_cublas(cublasStatus_t status, const char* call,
                  std::source_location where = std::source_location::current());

}  // namespace tiny_vllm

#define TV_CUBLAS(...) ::tiny_vllm::check_cublas((__VA_ARGS__), #__VA_ARGS__)
