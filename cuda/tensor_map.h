// Describes a matrix in global memory to Hopper's copy engine (TMA), which then brings boxes of it into shared memory
// on one thread's word, swizzled as the tensor cores want it. CUDA driver API, "Tensor Map Object Management".
#pragma once

#include <cuda.h>

#include <cstdint>

#include "base/dtype.h"

namespace tiny_vllm {

// A (rows, columns) matrix of bfloat16, read in boxes of box_rows × 64 elements: 128 bytes a row, with the 128-byte
// swizzle. columns must be a multiple of 64, box_rows of 8 and at most 256.
CUtensorMap matrix_map(const bfloat16* data, int64_t rows, int64_t columns, int64_t box_rows);

}  // namespace tiny_vllm
