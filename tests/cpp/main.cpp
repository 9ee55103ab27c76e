// Runs every TEST, or those whose "file name" contains the first argument.
#include <exception>
#include <string>

#include "check.h"

int main(int argc, char** argv) {
  using namespace tiny_vllm::testing;
  const std::string wanted = argc > 1 ? argv[1] : "";
  int passed = 0;
  int failed = 0;
  for (const Test& test : all_tests()) {
    const std::string full_name = std::string(test.file) + " " + test.name;
    if (full_name.find(wanted) == std::string::npos) continue;
    failures_in_this_test() = 0;
    try {
      test.body();
    } catch (const std::exception& e) {
      fail(test.file, 0, std::string("unexpected exception: ") + e.what());
    }
    ++(failures_in_this_test() == 0 ? passed : failed);
    if (failures_in_this_test() != 0) std::printf("FAILED %s\n", full_name.c_str());
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  if (passed + failed == 0) std::printf("no test matches \"%s\"\n", wanted.c_str());
  return failed == 0 && passed > 0 ? 0 : 1;
}
