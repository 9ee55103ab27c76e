// The gate of the MLP: activation(gate) · up.
//
// gate_up (rows, 2F) -> out (rows, F); activation(gate) is rounded before the product, as Hugging Face does.
// Shazeer, arXiv 2002.05202. Bytes moved: 3 · rows · F elements.
#include <algorithm>

#include "kernels/activation.h"
#include "kernels/device.h"
#include "kernels/kernels.h"

namespace tiny_vllm {
namespace {

// N elements a thread: 16 bytes when F is a multiple of them, else one.
template <typename T, int N>
__global__ void act_mul_kernel(const T* gate_up, Activation activation, T* out, int64_t rows, int64_t width) {
  struct alignas(sizeof(T) * N) V {
    T at[N];
  };
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t per_row = width / N, count = rows * per_row;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / per_row, column = i % per_row;
    const V gate = reinterpret_cast<const V*>(gate_up + row * 2 * width)[column];
    const V up = reinterpret_cast<const V*>(gate_up + row * 2 * width + width)[column];
    V result;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const float activated = load_float(round_to<T>(activate(activation, load_float(gate.at[e]))));
      result.at[e] = round_to<T>(activated * load_float(up.at[e]));
    }
    reinterpret_cast<V*>(out)[i] = result;
  }
}

}  // namespace

template <typename T>
void act_mul(const Stream& stream, const T* gate_up, Activation activation, T* out, int64_t rows, int64_t width) {
  constexpr int kThreads = 256, kSize = Vector<T>::kSize;
  const auto run = [&](auto kernel, int64_t count) {
    const int64_t blocks = std::min<int64_t>((count + kThreads - 1) / kThreads, int64_t{stream.num_sms} * 16);
    const KernelWork work("act_mul", 3 * rows * width * int64_t{sizeof(T)});
    launch(stream, work, kernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0, gate_up, activation, out, rows,
           width);
  };
  if (width % kSize == 0) {
    run(act_mul_kernel<T, kSize>, rows * width / kSize);
  } else {
    run(act_mul_kernel<T, 1>, rows * width);
  }
}

template void act_mul(const Stream&, const bfloat16*, Activation, bfloat16*, int64_t, int64_t);
template void act_mul(const Stream&, const float*, Activation, float*, int64_t, int64_t);

}  // namespace tiny_vllm
