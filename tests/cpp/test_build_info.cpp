#include <algorithm>

#include "backend/cuda_devices.h"
#include "base/build_info.h"
#include "base/error.h"
#include "check.h"

namespace tiny_vllm {

TEST(build_info_describes_this_build) {
  const BuildInfo& info = build_info();
  CHECK_EQ(std::count(info.version.begin(), info.version.end(), '.'), 2);
  CHECK(info.flags.find("-ffp-contract=off") != std::string::npos);
  CHECK(info.flags.find("-march=native") == std::string::npos);
  CHECK(!info.build_type.empty());
  CHECK(!info.cuda_reason.empty());
  CHECK_EQ(info.instruction_sets.front(), "portable");
  CHECK_EQ(info.cuda, !info.cuda_architectures.empty());
}

TEST(cuda_devices_are_listed_or_their_absence_explained) {
  const CudaDevices found = cuda_devices();
  CHECK_EQ(found.devices.empty(), !found.why_none.empty());
  if (!build_info().cuda) CHECK(found.why_none.find("no CUDA backend") != std::string::npos);
}

TEST(a_failed_check_names_its_place) {
  CHECK_THROWS(InternalError, "test_build_info.cpp", TV_CHECK(1 + 1 == 3, "sums are off"));
  CHECK_THROWS(InternalError, "sums are off (check `1 + 1 == 3` failed", TV_CHECK(1 + 1 == 3, "sums are ", "off"));
}

}  // namespace tiny_vllm
