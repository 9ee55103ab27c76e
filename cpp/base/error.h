// One error path: check, locate, throw. Every check is always compiled in.
//
// The four types below are what a person meets; the bindings turn each into the Python exception of the same name.
#pragma once

#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace tiny_vllm {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A model folder cannot be used: which file, which tensor or field, what was expected and what was found.
struct ModelLoadError : Error {
  using Error::Error;
};

// A request or an engine argument is out of range: which field, and the allowed range.
struct InvalidRequestError : Error {
  using Error::Error;
};

// How much memory was wanted, how much there is, and which argument to lower.
struct OutOfMemoryError : Error {
  using Error::Error;
};

// A device cannot be used, or one of its calls failed: which call, and what to do about it.
struct DeviceError : Error {
  using Error::Error;
};

// A broken promise between two rooms of this engine: a bug of ours, reported with its place in the source.
struct InternalError : Error {
  using Error::Error;
};

// "a", 3, "b" -> "a3b". All messages are built with it.
template <typename... Args>
std::string str(Args&&... args) {
  std::ostringstream out;
  (out << ... << std::forward<Args>(args));
  return out.str();
}

inline void check_failed(const char* condition, const std::string& message, std::source_location where) {
  throw InternalError(str(message, " (check `", condition, "` failed at ", where.file_name(), ":", where.line(), ")"));
}

}  // namespace tiny_vllm

// TV_CHECK(condition, parts of the message...): for what can only be wrong through a bug of ours.
// What a caller can get wrong is reported with one of the typed errors instead.
#define TV_CHECK(condition, ...)                                                                             \
  do {                                                                                                       \
    if (!(condition)) [[unlikely]]                                                                           \
      ::tiny_vllm::check_failed(#condition, ::tiny_vllm::str(__VA_ARGS__), std::source_location::current()); \
  } while (false)
