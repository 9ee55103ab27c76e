// libFuzzer target: any bytes are either refused with ModelLoadError or readable to their last byte.
#include <algorithm>
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

void open_and_read(std::span<const std::byte> bytes) {
  try {
    const SafetensorsFile file = SafetensorsFile::from_bytes(bytes, "fuzz");
    int64_t total = 0;
    for (const TensorEntry& tensor : file.tensors()) {
      touch(tensor, bytes);
      total += tensor.nbytes;
      require(file.find(tensor.name) == &tensor, "every tensor is found by its name");
    }
    require(total <= static_cast<int64_t>(bytes.size()), "tensors do not overlap");
  } catch (const ModelLoadError& e) {
    require(e.what()[0] != '\0', "a refusal says why");
  }
}

// A change of the header's text nearly always makes its length wrong, and the file would be refused for that alone. So
// the same bytes are tried again with the length that the last closing brace suggests.
std::vector<std::byte> with_repaired_length(std::span<const std::byte> bytes) {
  std::vector<std::byte> copy(bytes.begin(), bytes.end());
  const auto brace = std::find(copy.rbegin(), copy.rend(), std::byte{'}'});
  const auto header_end = static_cast<uint64_t>(copy.rend() - brace);
  if (header_end > 8)
    for (int i = 0; i < 8; ++i) copy[i] = static_cast<std::byte>((header_end - 8) >> (8 * i));
  return copy;
}

}  // namespace
}  // namespace tiny_vllm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  tiny_vllm::open_and_read(bytes);
  tiny_vllm::open_and_read(tiny_vllm::with_repaired_length(bytes));
  return 0;
}
