#include "base/build_info.h"

#include <sstream>

namespace tiny_vllm {
namespace {

// CMake hands its lists over as "a b c".
std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> items;
  std::istringstream in(list);
  for (std::string item; std::getline(in, item, ' ');) {
    if (!item.empty()) items.push_back(item);
  }
  return items;
}

}  // namespace

// The TV_BUILD_* macros are set by CMakeLists.txt, for this file only.
const BuildInfo& build_info() {
  static const BuildInfo info = {
      .version = TV_BUILD_VERSION,
      .compiler = TV_BUILD_COMPILER,
      .flags = TV_BUILD_FLAGS,
      .build_type = TV_BUILD_TYPE,
      .target = TV_BUILD_TARGET,
      .instruction_sets = split(TV_BUILD_INSTRUCTION_SETS),
      .cuda = TV_BUILD_CUDA != 0,
      .cuda_reason = TV_BUILD_CUDA_REASON,
      .cuda_version = TV_BUILD_CUDA_VERSION,
      .cuda_architectures = split(TV_BUILD_CUDA_ARCHITECTURES),
  };
  return info;
}

}  // namespace tiny_vllm
