// The tensor core instructions of Ampere and later, by name: ldmatrix, mma.m16n8k16, and asynchronous copies into
// shared memory. PTX ISA 8.0, chapters "Warp-level matrix instructions" and "Asynchronous copy".
//
// Who holds what in an m16n8k16 product (lane = 4 · g + c):
//   A (16 × 16, row-major)   a[0] (g, 2c..2c+1)   a[1] (g+8, 2c..)   a[2] (g, 2c+8..)   a[3] (g+8, 2c+8..)
//   B (16 × 8)               b[0] (2c..2c+1, g)   b[1] (2c+8.., g)
//   C (16 × 8, float32)      c[0..1] (g, 2c..2c+1)   c[2..3] (g+8, 2c..2c+1)
// The accumulator of one product has the layout that A of the next needs: attention's P never leaves the registers.
#pragma once

#include <cstdint>

namespace tiny_vllm {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// c (16 × 8) += a (16 × 16) · b (16 × 8), bfloat16 in, float32 out.
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 × 8 matrices of bfloat16. Lane l gives the address of row l % 8 of matrix l / 8; of each matrix it gets
// elements 2c and 2c+1 of row g.
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// The same, each matrix transposed on the way.
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// 16 bytes from global to shared memory, in the background; zeros when `valid` is false (nothing is read then).
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's newest groups are still on their way.
template <int N>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace tiny_vllm
