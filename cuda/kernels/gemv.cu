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
#include <algorithm>

#include "kernels/device.h"
#include "kernels/kernels.h"
#include "kernels/tensor_core.h"

namespace tiny_vllm {
namespace {

constexpr int kWarps = 8;
constexpr int kRows = 16;             // of the weight, a block of threads
constexpr int kUnroll = 8;            // 16-byte loads a lane and row in flight
constexpr int kPiece = kUnroll * 32;  // columns a warp takes at a time

// Weights are read once: they should not push anything else out of the first-level cache.
__device__ __forceinline__ uint4 load_once(const bfloat16* p) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p));
  return r;
}

template <int NT>  // tiles of 8 rows of x
__global__ void __launch_bounds__(kWarps* kWarp, 2)
    gemv_kernel(const bfloat16* __restrict__ x, const bfloat16* __restrict__ weight, const bfloat16* __restrict__ bias,
                void* out, bool out_is_float, int m, int64_t n, int64_t k) {
  __shared__ float partial[2][kWarps][kRows][8 * NT + 1];
  let_next_kernel_start();

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, c = lane % 4;
  const int64_t tiles = (n + kRows - 1) / kRows;
  const int64_t pieces = (k + kPiece * kWarps - 1) / (kPiece * kWarps);  // that each warp does of a tile

  uint4 w[kUnroll][2];  // of rows g and g + 8
  const auto load_weights = [&](int64_t tile, int64_t piece) {
    const int64_t first = (piece * kWarps + warp) * kPiece + c * 8;
    const int64_t row = min(tile * kRows + g, n - 1), row8 = min(tile * kRows + g + 8, n - 1);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t column = first + u * 32;
      w[u][0] = w[u][1] = uint4{};
      if (column < k) {
        w[u][0] = load_once(weight + row * k + column);
        w[u][1] = load_once(weight + row8 * k + column);
      }
    }
  };

  int64_t tile = blockIdx.x;
  if (tile < tiles) load_weights(tile, 0);
  wait_for_previous_kernel();

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
          const uint4 b = column < k ? *reinterpret_cast<const uint4*>(x + row * k + column) : uint4{};
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
    for (int i = threadIdx.x; i < kRows * m; i += kWarps * kWarp) {
      const int row = i % kRows, r = i / kRows;
      const int64_t column = tile * kRows + row;
      if (column >= n) continue;
      float sum = bias ? load_float(bias[column]) : 0.0f;
#pragma unroll
      for (int p = 0; p < kWarps; ++p) sum += partial[parity][p][row][r];
      if (out_is_float) {
        static_cast<float*>(out)[r * n + column] = sum;
      } else {
        static_cast<bfloat16*>(out)[r * n + column] = round_to<bfloat16>(sum);
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

void gemv(const Stream& stream, const bfloat16* x, const bfloat16* weight, const bfloat16* bias, void* out,
          bool out_is_float, int64_t m, int64_t n, int64_t k) {
  const int64_t tiles = (n + kRows - 1) / kRows;
  const dim3 blocks(static_cast<unsigned>(std::min<int64_t>(tiles, int64_t{2} * stream.num_sms)));
  launch(stream, "gemv", m <= 8 ? gemv_kernel<1> : gemv_kernel<2>, blocks, kWarps * kWarp, 0, x, weight, bias, out,
         out_is_float, static_cast<int>(m), n, k);
}

}  // namespace tiny_vllm
