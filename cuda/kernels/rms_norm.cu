// RMSNorm.
//
// out (rows, D) = round(x / sqrt(mean(x²) + eps)) · weight, rounded where Hugging Face rounds (backend.h).
// Zhang and Sennrich, arXiv 1910.07467.
//
// A row is read once: it stays in registers between the sum of squares and the scaling.
// Bytes moved: 2 · rows · D elements, and the D of the weight.
#include <algorithm>

#include "kernels/device.h"
#include "kernels/kernels.h"

namespace tiny_vllm {
namespace {

constexpr int kMaxVectors = 4;  // of 16 bytes, that a thread keeps of its row

// One block a row. Thread t holds vectors t, t + blockDim, ... of it.
template <typename T>
__global__ void __launch_bounds__(1024) rms_norm_kernel(const T* x, const T* weight, float eps, T* out, int dim) {
  using V = Vector<T>;
  __shared__ float room[kWarp];
  let_next_kernel_start();
  wait_for_previous_kernel();

  const int64_t row = int64_t{blockIdx.x} * dim;
  const int vectors = dim / V::kSize;
  float values[kMaxVectors][V::kSize];
  float squares = 0;
#pragma unroll
  for (int j = 0; j < kMaxVectors; ++j) {
    const int i = threadIdx.x + j * blockDim.x;
    if (i >= vectors) break;
    const V v = reinterpret_cast<const V*>(x + row)[i];
#pragma unroll
    for (int e = 0; e < V::kSize; ++e) {
      values[j][e] = load_float(v.at[e]);
      squares += values[j][e] * values[j][e];
    }
  }
  const float inverse_rms = __frsqrt_rn(block_sum(squares, room) / static_cast<float>(dim) + eps);
#pragma unroll
  for (int j = 0; j < kMaxVectors; ++j) {
    const int i = threadIdx.x + j * blockDim.x;
    if (i >= vectors) break;
    const V w = reinterpret_cast<const V*>(weight)[i];
    V result;
#pragma unroll
    for (int e = 0; e < V::kSize; ++e) {
      const float normalised = load_float(round_to<T>(values[j][e] * inverse_rms));
      result.at[e] = round_to<T>(normalised * load_float(w.at[e]));
    }
    reinterpret_cast<V*>(out + row)[i] = result;
  }
}

// Rows that are no whole number of vectors, or too long for the registers: element by element, x read twice.
template <typename T>
__global__ void __launch_bounds__(1024)
    rms_norm_any_kernel(const T* x, const T* weight, float eps, T* out, int64_t dim) {
  __shared__ float room[kWarp];
  let_next_kernel_start();
  wait_for_previous_kernel();

  const int64_t row = int64_t{blockIdx.x} * dim;
  const T* input = x + row;
  float squares = 0;
  for (int64_t i = threadIdx.x; i < dim; i += blockDim.x) {
    const float value = load_float(input[i]);
    squares += value * value;
  }
  const float inverse_rms = __frsqrt_rn(block_sum(squares, room) / static_cast<float>(dim) + eps);
  for (int64_t i = threadIdx.x; i < dim; i += blockDim.x) {
    const float normalised = load_float(round_to<T>(load_float(input[i]) * inverse_rms));
    out[row + i] = round_to<T>(normalised * load_float(weight[i]));
  }
}

int round_up_to_warps(int64_t threads) { return static_cast<int>(std::max<int64_t>(1, (threads + 31) / 32) * 32); }

}  // namespace

template <typename T>
void rms_norm(const Stream& stream, const T* x, const T* weight, float eps, T* out, int64_t rows, int64_t dim) {
  constexpr int64_t kSize = Vector<T>::kSize;
  const dim3 blocks(static_cast<unsigned>(rows));
  const KernelWork work("rms_norm", (2 * rows + 1) * dim * int64_t{sizeof(T)});
  if (dim % kSize == 0 && dim <= kMaxVectors * 1024 * kSize) {
    const int64_t vectors = dim / kSize;
    const int threads = vectors <= kMaxVectors * 256 ? std::min(256, round_up_to_warps(vectors)) : 1024;
    launch(stream, work, rms_norm_kernel<T>, blocks, threads, 0, x, weight, eps, out, static_cast<int>(dim));
  } else {
    launch(stream, work, rms_norm_any_kernel<T>, blocks, std::min(1024, round_up_to_warps(dim)), 0, x, weight, eps, out,
           dim);
  }
}

template void rms_norm(const Stream&, const bfloat16*, const bfloat16*, float, bfloat16*, int64_t, int64_t);
template void rms_norm(const Stream&, const float*, const float*, float, float*, int64_t, int64_t);

}  // namespace tiny_vllm
