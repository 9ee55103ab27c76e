// Which kernels can this processor run? Asked at run time, so that one build serves every machine.
#include "cpu/kernels.h"

#if defined(TV_KERNELS_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tiny_vllm {

namespace {

struct Candidate {
  const char* isa;
  const CpuKernels* (*kernels)();
  bool (*supported)();
};

bool always() { return true; }

// __builtin_cpu_supports also asks whether the operating system saves the wide registers.
#if defined(TV_KERNELS_AVX2)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif
#if defined(TV_KERNELS_AVX512) || defined(TV_KERNELS_AVX512_BF16) || defined(TV_KERNELS_AMX)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif
#if defined(TV_KERNELS_AVX512_BF16) || defined(TV_KERNELS_AMX)
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif
#if defined(TV_KERNELS_AMX)
// The tile registers are large, so Linux hands them out on request only, once for the whole process.
bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return has_avx512_bf16() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

// Best first. CMake defines TV_KERNELS_<SET> for the files that this build has.
constexpr Candidate kCandidates[] = {
#if defined(TV_KERNELS_AMX)
    {"amx", amx_kernels, has_amx},
#endif
#if defined(TV_KERNELS_AVX512_BF16)
    {"avx512_bf16", avx512_bf16_kernels, has_avx512_bf16},
#endif
#if defined(TV_KERNELS_AVX512)
    {"avx512", avx512_kernels, has_avx512},
#endif
#if defined(TV_KERNELS_AVX2)
    {"avx2", avx2_kernels, has_avx2},
#endif
#if defined(TV_KERNELS_NEON)
    {"neon", neon_kernels, always},
#endif
    {"portable", portable_kernels, always},
    {"reference", reference_kernels, always},
};

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Candidate& c : kCandidates) {
    if (c.supported()) names.push_back(c.isa);
  }
  return names;
}

const CpuKernels& select_kernels(const std::string& isa) {
  for (const Candidate& c : kCandidates) {
    if ((isa == "auto" || isa == c.isa) && c.supported()) return *c.kernels();
  }
  std::string known = "auto";
  for (const std::string& name : available_isas()) known += ", " + name;
  throw DeviceError(str("cpu_isa is '", isa, "'; this processor and build can run: ", known));
}

}  // namespace tiny_vllm
