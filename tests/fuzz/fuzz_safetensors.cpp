// libFuzzer target: any bytes are either refused with ModelLoadError or readable to their last byte.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>

#include "base/error.h"
#include "model/safetensors.h"

namespace tiny_vllm {
namespace {

volatile std::byte sink{};  // so that reading a byte is not optimised away

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

void touch(const TensorEntry& tensor, std::span<const std::byte> bytes) {
  require(tensor.data >= bytes.data() && tensor.data + tensor.nbytes <= bytes.data() + bytes.size(), "inside the file");
  for (int64_t i = 0; i < tensor.nbytes; ++i) sink = tensor.data[i];
  if (!tensor.supported) return;
  require(tensor.numel() * size_of(tensor.dtype) == tensor.nbytes, "bytes follow from shape and dtype");
  std::vector<float> wide(static_cast<size_t>(tensor.numel()));
  convert_to(tensor, DType::kFloat32, wide.data());
  std::vector<bfloat16> narrow(static_cast<size_t>(tensor.numel()));
  convert_to(tensor, DType::kBFloat16, narrow.data());
}

}  // namespace
}  // namespace tiny_vllm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tiny_vllm;
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  try {
    const SafetensorsFile file = SafetensorsFile::from_bytes(bytes, "fuzz");
    int64_t total = 0;
    for (const TensorEntry& tensor : file.tensors()) {
      touch(tensor, bytes);
      total += tensor.nbytes;
      require(file.find(tensor.name) == &tensor, "every tensor is found by its name");
    }
    require(total <= static_cast<int64_t>(size), "tensors do not overlap");
  } catch (const ModelLoadError& e) {
    require(e.what()[0] != '\0', "a refusal says why");
  }
  return 0;
}
