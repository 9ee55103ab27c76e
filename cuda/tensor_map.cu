#include "tensor_map.h"

#include "base/error.h"
#include "cuda_check.h"

namespace tiny_vllm {
namespace {

// The runtime is linked, the driver is not: its function is asked for when it is needed.
auto* encode_function() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  TV_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess)
    throw DeviceError("the NVIDIA driver has no cuTensorMapEncodeTiled: update it");
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

}  // namespace

CUtensorMap matrix_map(const bfloat16* data, int64_t rows, int64_t columns, int64_t box_rows) {
  static const auto encode = encode_function();
  CUtensorMap map{};
  const cuuint64_t size[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_bytes[1] = {static_cast<cuuint64_t>(columns) * sizeof(bfloat16)};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<bfloat16*>(data), size,
                                 row_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw DeviceError(str("cuTensorMapEncodeTiled failed with CUresult ", static_cast<int>(result), " for a matrix of ",
                          rows, " x ", columns));
  return map;
}

}  // namespace tiny_vllm
