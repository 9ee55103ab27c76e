// Large matrix products, by cuBLAS. Everything about cuBLAS's conventions is in gemm.cu.
#pragma once

#include <map>
#include <memory>
#include <tuple>

#include "base/tensor.h"
#include "cublas_library.h"
#include "launch.h"
#include "memory.h"

namespace tiny_vllm {

class Gemm {
 public:
  explicit Gemm(const Stream& stream);
  ~Gemm();  // in gemm.cu, where Plan is known
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  enum Mode { kStore, kAdd };

  // x (M, K) x weight (N, K)ᵀ + bias (N) -> out (M, N), or added to it. bias may be undefined; out may be float32 for
  // any dtype of x, but not to be added to.
  void matmul(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out, Mode mode);

 private:
  struct Plan;  // of a product with a bias

  void multiply(const Tensor& x, const Tensor& weight, const Tensor& out, Mode mode);
  void multiply_with_bias(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out, Mode mode);
  const Plan& plan(int64_t m, int64_t n, int64_t k, DType dtype);

  struct Handles {
    cublasHandle_t cublas = nullptr;
    cublasLtHandle_t lt = nullptr;
    ~Handles();
  };

  const Stream& stream_;
  Memory workspace_;  // outlives the handles
  Handles handles_;
  std::map<std::tuple<int64_t, int64_t, int64_t, DType>, std::unique_ptr<Plan>> plans_;
};

}  // namespace tiny_vllm
