// Matrix products with few rows: the decode of a small batch. Every weight is read once, and reading is all that
// counts.
//
// x (M, K) x weight (N, K)ᵀ + bias (N) -> out (M, N), M up to 16, K a multiple of 8.  Bytes moved: 2 · N · K.
//
// A block of threads takes 16 rows of the weight; each of its 8 warps takes every eighth piece of 256 columns, and what
// they found is summed in shared memory. The products are done by tensor cores, with the weight as A (16 × 16) and up
// to eight rows of x as B (16 × 8): a batch of eight costs what one row costs. The order of a dot product's terms is
// free, so a lane may take eight neighbouring columns where the layout of A speaks of 2c..2c+1 and 2c+8..2c+9: then all
// loads are 16 bytes wide.
//
// The weights of a lane's next piece are on their way while the last one is summed, and the first one is asked for
// before the previous kernel has ended: weights do not depend on it.
//
// A step of one token is a hundred small kernels, and each costs a microsecond or two however little it does. So what
// stands beside a product is done within it: for one row the RMS norm of x before it (each block does it for itself:
// the row is small, and the weights are on their way meanwhile), and after it the bias and the sum with the residual
// stream, or the gate of the MLP. For the gate, the 16 rows of a tile are 8 of the gate's and the 8 of `up` that belong
// to them.
#include <algorithm>

#include "base/error.h"
#include "kernels/activation.h"
#include "kernels/device.h"
#include "kernels/kernels.h"
#include "kernels/tensor_core.h"

namespace tiny_vllm {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRows = 16;                 // of the weight, a block of threads
constexpr int kUnroll = 8;                // 16-byte loads a lane and row in flight
constexpr int kPiece = kUnroll * 32;      // columns a warp takes at a time
constexpr int kNormVectors = 2;           // of a normalised row, a thread
constexpr int64_t kMaxStaged = 72 << 10;  // bytes of x in shared memory: there is room for two blocks a multiprocessor

enum class X { kGlobal, kStaged, kNormed };  // where the products read x from

// Distance of the rows of x in shared memory, in elements: the eight lanes that read at once find different banks.
__host__ __device__ constexpr int64_t staged_stride(int64_t k) { return (k + 63) / 64 * 64 + 32; }

// Weights are read once: they should not push anything else out of the first-level cache.
__device__ __forceinline__ uint4 load_once(const bfloat16* p) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p));
  return r;
}

// The RMS norm of one row x (K) into shared memory: the bits that rms_norm.cu makes, with the same order of sums. What
// does not depend on the previous kernel is loaded before the wait for it.
class Norm {
 public:
  __device__ explicit Norm(const GemvArgs& args) : args_(args) {
#pragma unroll
    for (int j = 0; j < kNormVectors; ++j)
      if (in_row(j)) weight_[j] = reinterpret_cast<const V*>(args.norm_weight)[threadIdx.x + j * kThreads];
  }

  __device__ void operator()(bfloat16* normed) const {
    __shared__ float room[kWarp];
    V x[kNormVectors];
    float squares = 0;
#pragma unroll
    for (int j = 0; j < kNormVectors; ++j) {
      if (!in_row(j)) break;
      x[j] = reinterpret_cast<const V*>(args_.x)[threadIdx.x + j * kThreads];
#pragma unroll
      for (int e = 0; e < V::kSize; ++e) squares += load_float(x[j].at[e]) * load_float(x[j].at[e]);
    }
    const float inverse_rms = __frsqrt_rn(block_sum(squares, room) / static_cast<float>(args_.k) + args_.eps);
#pragma unroll
    for (int j = 0; j < kNormVectors; ++j) {
      if (!in_row(j)) break;
      V result;
#pragma unroll
      for (int e = 0; e < V::kSize; ++e) {
        const float normalised = load_float(round_to<bfloat16>(load_float(x[j].at[e]) * inverse_rms));
        result.at[e] = round_to<bfloat16>(normalised * load_float(weight_[j].at[e]));
      }
      reinterpret_cast<V*>(normed)[threadIdx.x + j * kThreads] = result;
    }
    __syncthreads();
  }

 private:
  using V = Vector<bfloat16>;
  __device__ bool in_row(int j) const { return (threadIdx.x + j * kThreads) * V::kSize < args_.k; }
  const GemvArgs& args_;
  V weight_[kNormVectors];
};

__device__ void stage(const GemvArgs& args, bfloat16* staged) {
  for (int r = 0; r < args.m; ++r)
    for (int64_t i = threadIdx.x * 8; i < args.k; i += kThreads * 8)
      *reinterpret_cast<uint4*>(staged + r * staged_stride(args.k) + i) =
          *reinterpret_cast<const uint4*>(args.x + r * args.k + i);
  __syncthreads();
}

// NT: tiles of 8 rows of x.
template <int NT, X kX, bool kGate>
__global__ void __launch_bounds__(kThreads, 2) gemv_kernel(const __grid_constant__ GemvArgs args) {
  constexpr int kOut = kGate ? kRows / 2 : kRows;  // columns of out that a tile gives
  extern __shared__ uint4 shared[];
  __shared__ float partial[2][kWarps][kRows][8 * NT + 1];
  let_next_kernel_start();

  const int m = static_cast<int>(args.m);
  const int64_t n = args.n, k = args.k;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, c = lane % 4;
  const int64_t width = kGate ? n / 2 : n;
  const int64_t tiles = (width + kOut - 1) / kOut;
  const int64_t pieces = (k + kPiece * kWarps - 1) / (kPiece * kWarps);  // that each warp does of a tile

  uint4 w[kUnroll][2];  // of rows g and g + 8 of a tile
  const auto load_weights = [&](int64_t tile, int64_t piece) {
    const int64_t first = (piece * kWarps + warp) * kPiece + c * 8;
    const int64_t row = min(tile * kOut + g, width - 1);
    const int64_t rows[2] = {row, kGate ? width + row : min(tile * kOut + g + 8, width - 1)};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t column = first + u * 32;
#pragma unroll
      for (int h = 0; h < 2; ++h) w[u][h] = column < k ? load_once(args.weight + rows[h] * k + column) : uint4{};
    }
  };

  int64_t tile = blockIdx.x;
  if (tile < tiles) load_weights(tile, 0);
  const bfloat16* x = args.x;
  int64_t x_stride = k;
  if constexpr (kX == X::kGlobal) {
    wait_for_previous_kernel();
  } else {
    auto* staged = reinterpret_cast<bfloat16*>(shared);
    if constexpr (kX == X::kNormed) {
      const Norm norm(args);
      wait_for_previous_kernel();
      norm(staged);
    } else {
      wait_for_previous_kernel();
      stage(args, staged);
    }
    x = staged;
    x_stride = staged_stride(k);
  }

  int parity = 0;
  for (; tile < tiles; tile += gridDim.x) {
    float sums[NT][4] = {};
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t first = (piece * kWarps + warp) * kPiece + c * 8;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t column = first + u * 32;
        const uint4 w0 = w[u][0], w1 = w[u][1];
        const uint32_t low[4] = {w0.x, w1.x, w0.y, w1.y}, high[4] = {w0.z, w1.z, w0.w, w1.w};
#pragma unroll
        for (int t = 0; t < NT; ++t) {
          const int row = min(t * 8 + g, m - 1);  // a row too many is computed and not stored
          const uint4 b = column < k ? *reinterpret_cast<const uint4*>(x + row * x_stride + column) : uint4{};
          mma(sums[t], low, b.x, b.y);
          mma(sums[t], high, b.z, b.w);
        }
      }
      if (piece + 1 < pieces) {
        load_weights(tile, piece + 1);
      } else if (tile + gridDim.x < tiles) {
        load_weights(tile + gridDim.x, 0);
      }
    }

#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) partial[parity][warp][g + 8 * (i / 2)][t * 8 + 2 * c + i % 2] = sums[t][i];
    __syncthreads();
    const auto total = [&](int row, int r, int64_t column) {
      float sum = args.bias ? load_float(args.bias[column]) : 0.0f;
#pragma unroll
      for (int p = 0; p < kWarps; ++p) sum += partial[parity][p][row][r];
      return sum;
    };
    for (int i = threadIdx.x; i < kOut * m; i += kThreads) {
      const int row = i % kOut, r = i / kOut;
      const int64_t column = tile * kOut + row, at = r * width + column;
      if (column >= width) continue;
      bfloat16* out = static_cast<bfloat16*>(args.out) + at;
      const float sum = total(row, r, column);
      if constexpr (kGate) {
        const float gate = load_float(round_to<bfloat16>(sum));
        const float up = load_float(round_to<bfloat16>(total(row + 8, r, width + column)));
        *out = round_to<bfloat16>(load_float(round_to<bfloat16>(activate(args.activation, gate))) * up);
      } else if (args.epilogue == GemvArgs::kStoreFloat) {
        static_cast<float*>(args.out)[at] = sum;
      } else if (args.epilogue == GemvArgs::kAdd) {
        *out = round_to<bfloat16>(load_float(*out) + load_float(round_to<bfloat16>(sum)));
      } else {
        *out = round_to<bfloat16>(sum);
      }
    }
    parity ^= 1;  // the other half of `partial`: no second barrier is needed
  }
}

}  // namespace

// From 9 rows on each product costs twice the tensor core instructions, and cuBLAS wins where the weight is large
// (benchmarks/cuda_kernels.cu).
bool gemv_takes(int64_t m, int64_t n, int64_t k) {
  const bool quick = m <= 8 || (m <= 16 && n * k <= int64_t{8} << 20);
  return m > 0 && n > 0 && k > 0 && k % 8 == 0 && quick;
}

// Of two rows on, a norm that each block does for itself takes longer than one for all.
bool gemv_norm_takes(int64_t m, int64_t n, int64_t k) {
  return m == 1 && k <= kThreads * 8 * kNormVectors && gemv_takes(m, n, k);
}

void gemv(const Stream& stream, const GemvArgs& args) {
  const bool norm = args.norm_weight != nullptr, gate = args.epilogue == GemvArgs::kActMul, two = args.m > 8;
  TV_CHECK(gemv_takes(args.m, args.n, args.k) && (!norm || gemv_norm_takes(args.m, args.n, args.k)),
           "gemv does not take ", args.m, " x ", args.n, " x ", args.k);
  const int64_t tiles = (args.n + kRows - 1) / kRows, blocks = std::min<int64_t>(tiles, int64_t{2} * stream.num_sms);
  const int64_t bytes = args.m * staged_stride(args.k) * int64_t{sizeof(bfloat16)};
  const bool staged = !two && tiles > blocks && bytes <= kMaxStaged;
  auto kernel = gate ? gemv_kernel<1, X::kGlobal, true> : gemv_kernel<1, X::kGlobal, false>;
  if (two) kernel = gate ? gemv_kernel<2, X::kGlobal, true> : gemv_kernel<2, X::kGlobal, false>;
  if (staged) kernel = gate ? gemv_kernel<1, X::kStaged, true> : gemv_kernel<1, X::kStaged, false>;
  if (norm) kernel = gate ? gemv_kernel<1, X::kNormed, true> : gemv_kernel<1, X::kNormed, false>;
  const int64_t shared = staged || norm ? bytes : 0;
  if (shared > 0)
    TV_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kMaxStaged)));
  const int64_t out_bytes = args.m * args.n * (args.epilogue == GemvArgs::kStoreFloat ? 4 : 2) / (gate ? 2 : 1);
  const char* names[] = {"gemv", "norm_gemv", "gemv_act_mul", "norm_gemv_act_mul"};
  const KernelWork work(names[norm + 2 * gate], (args.n + args.m) * args.k * 2 + out_bytes,
                        2 * args.m * args.n * args.k);
  launch(stream, work, kernel, dim3(static_cast<unsigned>(blocks)), kThreads, static_cast<size_t>(shared), args);
}

}  // namespace tiny_vllm
