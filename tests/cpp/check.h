// A small test harness: TEST(name) { ... } registers itself, CHECK reports a failure and goes on, main() counts.
#pragma once

#include <cstdio>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

namespace tiny_vllm::testing {

struct Test {
  const char* file;
  const char* name;
  void (*body)();
};

inline std::vector<Test>& all_tests() {
  static std::vector<Test> tests;
  return tests;
}

inline int& failures_in_this_test() {
  static int failures = 0;
  return failures;
}

struct Register {
  Register(const char* file, const char* name, void (*body)()) { all_tests().push_back({file, name, body}); }
};

inline void fail(const char* file, int line, const std::string& message) {
  ++failures_in_this_test();
  std::printf("%s:%d: %s\n", file, line, message.c_str());
}

template <typename A, typename B>
void check_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  out << "CHECK_EQ(" << text << "): " << a << " against " << b;
  fail(file, line, out.str());
}

}  // namespace tiny_vllm::testing

#define TEST(name)                                                                           \
  static void test_##name();                                                                 \
  static const ::tiny_vllm::testing::Register register_##name(__FILE__, #name, test_##name); \
  static void test_##name()

#define CHECK(...)                                                                                          \
  do {                                                                                                      \
    if (!(__VA_ARGS__)) ::tiny_vllm::testing::fail(__FILE__, __LINE__, "CHECK(" #__VA_ARGS__ ") is false"); \
  } while (false)

#define CHECK_EQ(a, b) ::tiny_vllm::testing::check_equal((a), (b), #a ", " #b, __FILE__, __LINE__)

// The statement throws exactly this type (or one derived from it), and its message contains `part`.
#define CHECK_THROWS(type, part, ...)                                                                              \
  do {                                                                                                             \
    std::string what_was_thrown = "nothing";                                                                       \
    bool right_error = false;                                                                                      \
    try {                                                                                                          \
      __VA_ARGS__;                                                                                                 \
    } catch (const type& e) {                                                                                      \
      what_was_thrown = e.what();                                                                                  \
      right_error = what_was_thrown.find(part) != std::string::npos;                                               \
    } catch (const std::exception& e) {                                                                            \
      what_was_thrown = std::string("another type: ") + e.what();                                                  \
    }                                                                                                              \
    if (!right_error)                                                                                              \
      ::tiny_vllm::testing::fail(__FILE__, __LINE__,                                                               \
                                 "expected " #type " with \"" + std::string(part) + "\", got " + what_was_thrown); \
  } while (false)
