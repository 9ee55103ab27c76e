// Vec: sixteen floats, on every instruction set. The kernels are written once on it.
//
// Each kernels_<isa>.cpp defines TINY_VLLM_ISA (the namespace that its copy of the kernels lives in) and includes this
// header; the compiler flags of that file decide which of the simd_*.h files below is taken.
//
// Everything is in an anonymous namespace and nothing here calls a function of the standard library. Otherwise two
// files compiled for different instruction sets would offer the linker the same inline function, it would keep one of
// them for the whole program, and a processor without AVX-512 would meet AVX-512 code where nobody expects it.
//
// What each file must define:
//   zero() set1(x)                          all lanes
//   load(float*) load(float*, n)            n < 16: the first n lanes, zeros behind; nothing past them is read
//   load(bfloat16*) load(bfloat16*, n)      the same, widened to float
//   store(p, v) store(p, v, n)              to float or bfloat16 (round to nearest even; NaN stays NaN)
//   + - * / fma(a, b, c) = a*b+c            max(a, b) min(a, b): b where either is NaN
//   shift_left_23(v)                        of the bits of each lane, as integers: builds powers of two
//   reduce_max(v)
//   reduce_add(v), reduce_add(Vec[16])      one sum, or lane i = sum of v[i]: ONE fixed tree, the same in both:
//                                           lanes i + i+8, then i + i+4, then i + i+2, then i + i+1
//   kTileRows, kTileCols                  how many dot products matmul() should work on at once
//   Pairs, load_pairs(p) load_pairs(p, n)   32 bfloat16 ready to be multiplied
//   dot(acc, Pairs a, Pairs b)              acc[i] + a[2i]*b[2i] + a[2i+1]*b[2i+1]
#pragma once

#ifndef TINY_VLLM_ISA
#error "simd.h is for kernels_<isa>.cpp, which define TINY_VLLM_ISA"
#endif

#include <cstdint>

#include "base/dtype.h"

#if defined(TINY_VLLM_PORTABLE)
#include "cpu/simd_portable.h"
#elif defined(__AVX512F__)
#include "cpu/simd_avx512.h"
#elif defined(__AVX2__)
#include "cpu/simd_avx2.h"
#elif defined(__ARM_NEON)
#include "cpu/simd_neon.h"
#endif

namespace tiny_vllm::TINY_VLLM_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

// How a dot product of two rows of T steps through them: kStep elements at a time, each step one dot().
template <typename T>
struct Dot;

template <>
struct Dot<float> {
  static constexpr int64_t kStep = 16;
  using Operand = Vec;
  static Operand load_operand(const float* p) { return load(p); }
  static Operand load_operand(const float* p, int64_t n) { return load(p, n); }
  static Vec step(Vec acc, Operand a, Operand b) { return fma(a, b, acc); }
};

template <>
struct Dot<bfloat16> {
  static constexpr int64_t kStep = 32;
  using Operand = Pairs;
  static Operand load_operand(const bfloat16* p) { return load_pairs(p); }
  static Operand load_operand(const bfloat16* p, int64_t n) { return load_pairs(p, n); }
  static Vec step(Vec acc, Operand a, Operand b) { return dot(acc, a, b); }
};

}  // namespace
}  // namespace tiny_vllm::TINY_VLLM_ISA
