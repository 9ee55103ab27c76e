// A file seen as memory: the kernel reads pages when they are first touched, and may drop them again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

namespace tiny_vllm {

// Read-only and private to this process. The size is taken once, when the file is opened: do not shorten a file while
// an engine has it open, or the kernel ends the process when a page that is gone is touched (SIGBUS).
class MappedFile {
 public:
  // Throws ModelLoadError naming the file: missing, a directory, not readable, empty.
  static MappedFile open(const std::string& path);

  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept { swap(other); }
  MappedFile& operator=(MappedFile&& other) noexcept {
    MappedFile(std::move(other)).swap(*this);
    return *this;
  }
  ~MappedFile();

  const std::byte* data() const { return data_; }
  int64_t size() const { return size_; }
  std::span<const std::byte> bytes() const { return {data_, static_cast<size_t>(size_)}; }
  const std::string& path() const { return path_; }

 private:
  void swap(MappedFile& other) noexcept;

  const std::byte* data_ = nullptr;
  int64_t size_ = 0;
  std::string path_;
};

enum class Advice : uint8_t {
  kSequential,  // will be read once, in order: read far ahead
  kWillNeed,    // start reading now
};

// Tells the kernel how this memory will be used. Only a hint: nothing is reported if it does not help.
void advise(const void* data, int64_t nbytes, Advice advice);

}  // namespace tiny_vllm
