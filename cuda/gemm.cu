#include "gemm.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "kernels/device.h"

namespace tiny_vllm {
namespace {

// What NVIDIA recommends for Hopper. cuBLAS would allocate its own on first use, which a graph capture does not allow.
constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

// sums (M, N) + bias (N), rounded once, -> out (M, N), or added to it.
template <typename T, typename Out>
__global__ void add_bias_kernel(const float* sums, const T* bias, Out* out, int64_t count, int64_t n, bool add) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const Out sum = round_to<Out>(sums[i] + load_float(bias[i % n]));
    out[i] = add ? round_to<Out>(load_float(out[i]) + load_float(sum)) : sum;
  }
}

template <typename T, typename Out>
void add_bias(const Stream& stream, const float* sums, const Tensor& bias, const Tensor& out, bool add) {
  const int64_t count = out.numel(), blocks = std::min<int64_t>((count + 255) / 256, int64_t{stream.num_sms} * 16);
  const KernelWork work("add_bias", count * int64_t{sizeof(float) + sizeof(Out)} + bias.nbytes());
  launch(stream, work, add_bias_kernel<T, Out>, dim3(static_cast<unsigned>(blocks)), 256, 0, sums, bias.as<T>(),
         out.as<Out>(), count, out.shape[1], add);
}

// Each matrix moves once, what is added to twice, and the tensor cores multiply and add M · N · K times.
KernelWork product(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out, Gemm::Mode mode) {
  const int64_t bias_bytes = bias.defined() ? bias.nbytes() : 0,
                out_bytes = out.nbytes() * (mode == Gemm::kAdd ? 2 : 1);
  return {"gemm", x.nbytes() + weight.nbytes() + bias_bytes + out_bytes, 2 * out.numel() * x.shape[1]};
}

cudaDataType_t cuda_type(DType dtype) {
  TV_CHECK(dtype != DType::kFloat16, "the CUDA backend computes in bfloat16 or float32");
  return dtype == DType::kFloat32 ? CUDA_R_32F : CUDA_R_16BF;
}

}  // namespace

// How cublasLt does a product of one size. Choosing takes longer than a small product, so it is kept.
struct Gemm::Plan {
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulAlgo_t algo{};

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    for (cublasLtMatrixLayout_t layout : {a, b, c})
      if (layout) cublas().lt_layout_destroy(layout);
    if (desc) cublas().lt_desc_destroy(desc);
  }
};

Gemm::Gemm(const Stream& stream) : stream_(stream), workspace_(Memory::kDevice, kWorkspaceBytes) {
  TV_CUBLAS(cublas().create(&handles_.cublas));
  TV_CUBLAS(cublas().set_stream(handles_.cublas, stream.handle));
  // A product whose K is cut among multiprocessors would otherwise be summed in bfloat16.
  TV_CUBLAS(cublas().set_math_mode(
      handles_.cublas,
      static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
  TV_CUBLAS(cublas().set_workspace(handles_.cublas, workspace_.as(), kWorkspaceBytes));
  TV_CUBLAS(cublas().lt_create(&handles_.lt));
}

Gemm::~Gemm() = default;

Gemm::Handles::~Handles() {
  if (lt) ::tiny_vllm::cublas().lt_destroy(lt);
  if (cublas) ::tiny_vllm::cublas().destroy(cublas);
}

void Gemm::matmul(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out, Mode mode) {
  const int64_t m = x.shape[0], k = x.shape[1], n = weight.shape[0];
  TV_CHECK(m <= INT32_MAX && n <= INT32_MAX && k <= INT32_MAX, "a product of ", m, " x ", k, " x ", n);
  if (!bias.defined()) return multiply(x, weight, out, mode);
  if (x.dtype == DType::kBFloat16 && out.dtype == x.dtype && n % 8 == 0 && k % 8 == 0)
    return multiply_with_bias(x, weight, bias, out, mode);

  // Of odd sizes even cublasLt rounds the product before it adds the bias. Float32 sums are added to afterwards.
  if (out.dtype == DType::kFloat32) {
    multiply(x, weight, out, mode);
    if (bias.dtype == DType::kFloat32) return add_bias<float, float>(stream_, out.as<float>(), bias, out, false);
    return add_bias<bfloat16, float>(stream_, out.as<float>(), bias, out, false);
  }
  float* memory = nullptr;
  TV_CUDA(cudaMallocAsync(&memory, static_cast<size_t>(m * n) * sizeof(float), stream_.handle));
  const auto free_in_order = [this](float* p) { cudaFreeAsync(p, stream_.handle); };
  const std::unique_ptr<float, decltype(free_in_order)> sums(memory, free_in_order);
  multiply(x, weight, Tensor(sums.get(), DType::kFloat32, {m, n}), kStore);
  add_bias<bfloat16, bfloat16>(stream_, sums.get(), bias, out, mode == kAdd);
}

// cuBLAS was written for Fortran: a matrix lies in memory column after column. Ours lie row after row. The same memory
// read the other way is the transposed matrix, so instead of moving a single number we ask for another product:
//
//   we want             out   (M × N, rows)    = x (M × K, rows) · weightᵀ      weight (N × K, rows)
//   memory says         outᵀ  (N × M, columns),  xᵀ (K × M, columns),  weightᵀ (K × N, columns)
//   and                 outᵀ = weight · xᵀ
//   so we ask for       C (N × M) = op(A) · op(B)  with  A = weight's memory, transposed (OP_T);  B = x's memory (OP_N)
//
// The leading dimension is the distance between columns: K for A and B, N for C.
void Gemm::multiply(const Tensor& x, const Tensor& weight, const Tensor& out, Mode mode) {
  const auto m = static_cast<int>(x.shape[0]), k = static_cast<int>(x.shape[1]), n = static_cast<int>(weight.shape[0]);
  const float alpha = 1, beta = mode == kAdd ? 1 : 0;  // of the product, and of what is in out
  const int ld = std::max(1, k);                       // 0 is refused, even where no element is read
  profiled(stream_, product(x, weight, Tensor(), out, mode), [&] {
    TV_CUBLAS(cublas().gemm_ex(handles_.cublas, CUBLAS_OP_T, CUBLAS_OP_N, n, m, k, &alpha, weight.data,
                               cuda_type(weight.dtype), ld, x.data, cuda_type(x.dtype), ld, &beta, out.data,
                               cuda_type(out.dtype), n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  });
}

// The same product by cublasLt, which adds the bias to the float32 sums before it rounds them. (GemmEx could add to an
// `out` that holds the bias, but rounds the product first.) Read as columns, the bias belongs to the rows of outᵀ.
void Gemm::multiply_with_bias(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out, Mode mode) {
  const Plan& p = plan(x.shape[0], weight.shape[0], x.shape[1], x.dtype);
  TV_CUBLAS(cublas().lt_desc_set(p.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.data, sizeof bias.data));
  const float alpha = 1, beta = mode == kAdd ? 1 : 0;  // of the product, and of what is in out
  profiled(stream_, product(x, weight, bias, out, mode), [&] {
    TV_CUBLAS(cublas().lt_matmul(handles_.lt, p.desc, &alpha, weight.data, p.a, x.data, p.b, &beta, out.data, p.c,
                                 out.data, p.c, &p.algo, workspace_.as(), kWorkspaceBytes, stream_.handle));
  });
}

const Gemm::Plan& Gemm::plan(int64_t m, int64_t n, int64_t k, DType dtype) {
  std::unique_ptr<Plan>& known = plans_[{m, n, k, dtype}];
  if (known) return *known;
  auto p = std::make_unique<Plan>();
  const cudaDataType_t type = cuda_type(dtype);
  const cublasOperation_t transposed = CUBLAS_OP_T;
  const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
  const CublasLibrary& lib = cublas();
  TV_CUBLAS(lib.lt_desc_create(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  TV_CUBLAS(lib.lt_desc_set(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
  TV_CUBLAS(lib.lt_desc_set(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
  TV_CUBLAS(lib.lt_layout_create(&p->a, type, static_cast<uint64_t>(k), static_cast<uint64_t>(n), k));
  TV_CUBLAS(lib.lt_layout_create(&p->b, type, static_cast<uint64_t>(k), static_cast<uint64_t>(m), k));
  TV_CUBLAS(lib.lt_layout_create(&p->c, type, static_cast<uint64_t>(n), static_cast<uint64_t>(m), n));

  cublasLtMatmulPreference_t preference = nullptr;
  TV_CUBLAS(lib.lt_preference_create(&preference));
  const std::unique_ptr<std::remove_pointer_t<cublasLtMatmulPreference_t>,
                        cublasStatus_t (*)(cublasLtMatmulPreference_t)>
      owner(preference, lib.lt_preference_destroy);
  const size_t workspace = kWorkspaceBytes;
  TV_CUBLAS(lib.lt_preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace));
  const uint32_t in_float = CUBLASLT_REDUCTION_SCHEME_INPLACE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  TV_CUBLAS(lib.lt_preference_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &in_float, sizeof in_float));
  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  TV_CUBLAS(lib.lt_heuristic(handles_.lt, p->desc, p->a, p->b, p->c, p->c, preference, 1, &result, &found));
  TV_CHECK(found == 1, "cublasLt knows no way to multiply ", m, " x ", k, " by ", k, " x ", n, " in ", name_of(dtype));
  p->algo = result.algo;
  known = std::move(p);
  return *known;
}

}  // namespace tiny_vllm
