#include "cpu/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>
#include <tuple>

namespace tiny_vllm {

namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kLarge = int64_t{4} << 20;  // from here on, whole pages from the kernel

// The number after `key` in a file of "key number" lines ("key: number kB" in /proc/meminfo), or -1.
int64_t number_after(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) == 0) return std::atoll(line.c_str() + key.size());
  }
  return -1;
}

// The number that is a file's whole content, or -1 ("max", or no such file).
int64_t number_in(const std::string& path) {
  std::ifstream file(path);
  int64_t value = -1;
  return file >> value ? value : -1;
}

struct Cgroup {
  int64_t limit = -1;
  int64_t used = 0;
};

// Limits of the memory cgroup, version 2 or 1. File pages that the kernel can drop do not count as used.
Cgroup memory_cgroup() {
  for (const auto& [limit, used, stat, key] :
       {std::tuple{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat",
                   "inactive_file "},
        std::tuple{"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes",
                   "/sys/fs/cgroup/memory/memory.stat", "total_inactive_file "}}) {
    const int64_t bytes = number_in(limit);
    if (bytes > 0 && bytes < std::numeric_limits<int64_t>::max() / 2) {
      return {bytes, std::max<int64_t>(0, number_in(used) - std::max<int64_t>(0, number_after(stat, key)))};
    }
  }
  return {};
}

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

std::string mebibytes(int64_t bytes) { return str(bytes >> 20, " MiB"); }

[[noreturn]] void refuse(int64_t bytes, int64_t available) {
  throw OutOfMemoryError(str("wanted ", mebibytes(bytes), " of memory, ", mebibytes(available),
                             " are available; lower kv_cache_memory_bytes, max_model_len, max_num_seqs or "
                             "max_num_batched_tokens, or use a smaller model"));
}

}  // namespace

MemoryInfo host_memory() {
  MemoryInfo info;
  info.total_bytes = number_after("/proc/meminfo", "MemTotal:") << 10;
  info.available_bytes = number_after("/proc/meminfo", "MemAvailable:") << 10;
  if (info.total_bytes <= 0) info.total_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  if (info.available_bytes <= 0) info.available_bytes = info.total_bytes;
  const Cgroup cgroup = memory_cgroup();
  if (cgroup.limit > 0) {
    info.total_bytes = std::min(info.total_bytes, cgroup.limit);
    info.available_bytes = std::min(info.available_bytes, std::max<int64_t>(0, cgroup.limit - cgroup.used));
  }
  return info;
}

Buffer allocate_host(int64_t bytes) {
  TV_CHECK(bytes >= 0, "allocation of ", bytes, " bytes");
  if (bytes < kLarge) {
    void* p = std::aligned_alloc(kAlignment, static_cast<size_t>(std::max(kAlignment, round_up(bytes, kAlignment))));
    if (!p) refuse(bytes, host_memory().available_bytes);
    return Buffer(p, std::free);
  }

  // Linux promises memory that it does not have and kills the process when it is touched, so ask first.
  const int64_t available = host_memory().available_bytes;
  if (bytes > available) refuse(bytes, available);

  // mmap aligns to small pages only: take one huge page more, and give back what sticks out at both ends.
  const int64_t size = round_up(bytes, kHugePage);
  void* raw =
      mmap(nullptr, static_cast<size_t>(size + kHugePage), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) refuse(bytes, available);
  const int64_t start = reinterpret_cast<int64_t>(raw), begin = round_up(start, kHugePage);
  if (begin > start) munmap(raw, static_cast<size_t>(begin - start));
  if (begin - start < kHugePage) {
    munmap(reinterpret_cast<void*>(begin + size), static_cast<size_t>(kHugePage - (begin - start)));
  }
  void* p = reinterpret_cast<void*>(begin);
#ifdef MADV_HUGEPAGE
  madvise(p, static_cast<size_t>(size), MADV_HUGEPAGE);  // a wish: where it is refused, small pages do
#endif
  return Buffer(p, [size](void* q) { munmap(q, static_cast<size_t>(size)); });
}

}  // namespace tiny_vllm
