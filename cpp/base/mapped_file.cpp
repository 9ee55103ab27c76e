#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/printable.h"

namespace tiny_vllm {
namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw ModelLoadError(str(printable(path, 4096), ": ", why));
}

std::string system_message(int error) { return std::generic_category().message(error); }

}  // namespace

MappedFile MappedFile::open(const std::string& path) {
  if (path.find('\0') != std::string::npos) refuse(path, "a path cannot hold a NUL byte");
  // O_NONBLOCK: opening a named pipe must not wait for a writer. It means nothing for plain files.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) refuse(path, str("cannot open: ", system_message(errno)));
  struct stat info{};
  void* address = MAP_FAILED;
  std::string problem;
  if (::fstat(fd, &info) != 0) {
    problem = str("cannot read its size: ", system_message(errno));
  } else if (S_ISDIR(info.st_mode)) {
    problem = "is a directory, not a file";
  } else if (!S_ISREG(info.st_mode)) {
    problem = "is not a plain file";
  } else if (info.st_size == 0) {
    problem = "is empty (0 bytes): an unfinished download?";
  } else {
    address = ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
    if (address == MAP_FAILED) problem = str("cannot map ", info.st_size, " bytes: ", system_message(errno));
  }
  ::close(fd);  // the mapping keeps the file
  if (address == MAP_FAILED) refuse(path, problem);

  MappedFile file;
  file.data_ = static_cast<const std::byte*>(address);
  file.size_ = info.st_size;
  file.path_ = path;
  return file;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), static_cast<size_t>(size_));
}

void MappedFile::swap(MappedFile& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(path_, other.path_);
}

void advise(const void* data, int64_t nbytes, Advice advice) {
  if (nbytes <= 0) return;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(data) / page * page;
  const auto end = reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(nbytes);
  ::madvise(reinterpret_cast<void*>(begin), end - begin,
            advice == Advice::kSequential ? MADV_SEQUENTIAL : MADV_WILLNEED);
}

}  // namespace tiny_vllm
