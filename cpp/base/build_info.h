// How this binary was made: what `tiny-vllm info` prints and what a bug report should contain.
#pragma once

#include <string>
#include <vector>

namespace tiny_vllm {

struct BuildInfo {
  std::string version;
  std::string compiler;                         // "GNU 12.2.0"
  std::string flags;                            // those given to every file
  std::string build_type;                       // "Release"
  std::string target;                           // "x86_64"
  std::vector<std::string> instruction_sets;    // kernels compiled in, plainest first; the CPU decides which run
  bool cuda = false;                            // the CUDA backend is part of this binary
  std::string cuda_reason;                      // why it is, or why not
  std::string cuda_version;                     // of the toolkit, "" without
  std::vector<std::string> cuda_architectures;  // "80", "90"; empty without
};

const BuildInfo& build_info();

}  // namespace tiny_vllm
