// Runs every TEST, or those whose "file name" contains an argument; an argument -WORD leaves out those that contain
// WORD.
#include <exception>
#include <string>
#include <vector>

#include "check.h"

int main(int argc, char** argv) {
  using namespace tiny_vllm::testing;
  std::vector<std::string> wanted, unwanted;
  for (int i = 1; i < argc; ++i) {
    if (argv[i][0] == '-') {
      unwanted.push_back(argv[i] + 1);
    } else {
      wanted.push_back(argv[i]);
    }
  }
  int passed = 0, failed = 0, left_out = 0;
  for (const Test& test : all_tests()) {
    const std::string full_name = std::string(test.file) + " " + test.name;
    bool runs = wanted.empty();
    for (const std::string& word : wanted) runs = runs || full_name.find(word) != std::string::npos;
    for (const std::string& word : unwanted) runs = runs && full_name.find(word) == std::string::npos;
    if (!runs) {
      ++left_out;
      continue;
    }
    failures_in_this_test() = 0;
    try {
      test.body();
    } catch (const std::exception& e) {
      fail(test.file, 0, std::string("unexpected exception: ") + e.what());
    }
    ++(failures_in_this_test() == 0 ? passed : failed);
    if (failures_in_this_test() != 0) std::printf("FAILED %s\n", full_name.c_str());
  }
  std::printf("%d passed, %d failed, %d skipped\n", passed, failed, left_out);
  if (passed + failed == 0) std::printf("no test has such a name\n");
  return failed == 0 && passed > 0 ? 0 : 1;
}
