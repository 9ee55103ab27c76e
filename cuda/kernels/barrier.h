// Barriers in shared memory on which asynchronous copies arrive (mbarrier), and the copy engine that arrives there.
// PTX ISA 8.0, chapters "mbarrier" and "cp.async.bulk.tensor". Compute capability 9.0.
//
// A barrier has phases. One ends when all expected arrivals have come, and all expected bytes. Who waits says which
// phase by its parity: the first one is 0, the next 1, then 0 again.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/tensor_core.h"

namespace tiny_vllm {

__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// After all are initialised, by the thread that did it; a __syncthreads() follows.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void arrive_and_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// One box of the matrix, which begins at (row, column), to shared memory; its bytes arrive at the barrier.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int row, int column, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// Moves registers between the warpgroups of a block: one that only starts copies needs few.
template <int N>
__device__ __forceinline__ void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

}  // namespace tiny_vllm
