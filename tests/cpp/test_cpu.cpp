// The CPU backend below its ops: memory, instruction sets, indices beyond 2^31, and a fork in between.
// The ops' values are checked in tests/test_ops.py, against numpy.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "check.h"
#include "cpu/cpu_backend.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "cpu/thread_pool.h"

namespace tiny_vllm {
namespace {

std::unique_ptr<Backend> cpu(int num_threads, const std::string& isa = "auto") {
  return make_backend({.device = "cpu", .num_threads = num_threads, .cpu_isa = isa});
}

TEST(cpu_memory_is_aligned_and_refused_with_both_numbers) {
  std::unique_ptr<Backend> backend = cpu(1);
  for (int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{65}, int64_t{1} << 20, (int64_t{8} << 20) + 1}) {
    const Buffer buffer = backend->allocate(bytes);
    CHECK(reinterpret_cast<uintptr_t>(buffer.get()) % 64 == 0);
    std::memset(buffer.get(), 1, static_cast<size_t>(bytes));
  }
  const MemoryInfo memory = backend->memory();
  CHECK(memory.available_bytes > 0 && memory.available_bytes <= memory.total_bytes);
  const int64_t too_much = memory.total_bytes + (int64_t{1} << 30);
  CHECK_THROWS(OutOfMemoryError, str("wanted ", too_much >> 20, " MiB"), backend->allocate(too_much));
  CHECK_THROWS(OutOfMemoryError, "are available; lower", backend->allocate(int64_t{1} << 60));
}

TEST(cpu_backend_is_chosen_by_name) {
  for (const std::string& isa : available_isas()) {
    CHECK_EQ(cpu(3, isa)->description(), "cpu, " + isa + ", 3 threads");
  }
  CHECK_EQ(cpu(1)->description(), "cpu, " + available_isas().front() + ", 1 thread");
  CHECK_THROWS(DeviceError, "cpu_isa is 'sse9'", cpu(1, "sse9"));
  CHECK_THROWS(DeviceError, "device is 'tpu'", make_backend({.device = "tpu"}));
  CHECK_THROWS(InvalidRequestError, "num_threads is -1", cpu(-1));
}

// Address space that costs no memory until it is written: zeros everywhere.
Buffer untouched(int64_t bytes) {
  void* p = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  return Buffer(p, [bytes](void* q) { munmap(q, static_cast<size_t>(bytes)); });
}

struct BigCache {
  static constexpr int64_t kBlocks = 140'000, kKvHeads = 8, kBlockSize = 16, kHeadDim = 128;
  static constexpr int64_t kNumbers = kBlocks * kKvHeads * kBlockSize * kHeadDim;
  static_assert(kNumbers > int64_t{1} << 31);
};

// A token whose keys lie beyond element 2^31 of the cache attends as one whose keys lie at the start.
template <typename T>
std::vector<char> attend_in_block(const std::string& isa, int32_t block) {
  using C = BigCache;
  std::unique_ptr<Backend> backend = cpu(2, isa);
  const Buffer keys = untouched(C::kNumbers * int64_t{sizeof(T)}), values = untouched(C::kNumbers * int64_t{sizeof(T)});
  const auto cache = [&](const Buffer& b) {
    return Tensor(b.get(), dtype_of<T>(), {C::kBlocks, C::kKvHeads, C::kBlockSize, C::kHeadDim});
  };
  const PagedKv kv = {cache(keys), cache(values)};
  const AttentionShape shape = {.num_heads = 8,
                                .num_kv_heads = C::kKvHeads,
                                .head_dim = C::kHeadDim,
                                .block_size = C::kBlockSize,
                                .sliding_window = 0,
                                .scale = 0.1f};
  constexpr int64_t kTokens = 5, kQkv = 3 * C::kKvHeads * C::kHeadDim;
  std::vector<T> qkv(kTokens * kQkv), out(kTokens * C::kKvHeads * C::kHeadDim);
  uint32_t state = 7;
  for (T& x : qkv)
    x = from_float<T>(static_cast<float>((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1);

  StepBatch step;
  step.query_start = {0, kTokens};
  step.context_len = {kTokens};
  step.block_tables = {block};
  step.block_table_width = 1;
  for (int t = 0; t < kTokens; ++t) {
    step.token_ids.push_back(0);
    step.positions.push_back(t);
    step.slot_mapping.push_back(int64_t{block} * C::kBlockSize + t);
  }
  step.cos_sin.assign(kTokens * C::kHeadDim, 0.6f);
  const DeviceBatch batch = backend->upload(step);
  const Tensor qkv_tensor(qkv.data(), dtype_of<T>(), {kTokens, kQkv});
  const Tensor out_tensor(out.data(), dtype_of<T>(), {kTokens, C::kKvHeads * C::kHeadDim});
  backend->rope_and_cache(qkv_tensor, {}, {}, 1e-6f, batch, shape, kv);
  backend->paged_attention(qkv_tensor, batch, shape, kv, out_tensor);
  const char* data = reinterpret_cast<const char*>(out.data());
  return {data, data + out.size() * sizeof(T)};
}

TEST(cpu_indices_beyond_2_to_31) {
  for (const std::string& isa : available_isas()) {
    const int32_t last = BigCache::kBlocks - 1;
    CHECK(attend_in_block<bfloat16>(isa, last) == attend_in_block<bfloat16>(isa, 0));
    CHECK(attend_in_block<float>(isa, last) == attend_in_block<float>(isa, 0));
  }
  std::unique_ptr<Backend> backend = cpu(1);
  constexpr int64_t kRows = 262'144, kDim = 8960;  // 2.3e9 numbers
  const Buffer memory = untouched(kRows * kDim * 2);
  const Tensor table(memory.get(), DType::kBFloat16, {kRows, kDim});
  table.as<bfloat16>()[kRows * kDim - 1] = to_bfloat16(3.0f);
  std::vector<bfloat16> row(kDim);
  const int32_t id = kRows - 1;
  backend->embedding(table, &id, Tensor(row.data(), DType::kBFloat16, {1, kDim}));
  CHECK_EQ(to_float(row.back()), 3.0f);
  CHECK_EQ(to_float(row.front()), 0.0f);
}

TEST(cpu_ops_refuse_what_does_not_fit_together) {
  std::unique_ptr<Backend> backend = cpu(1);
  std::vector<float> numbers(64, 1.0f);
  const auto tensor = [&](std::initializer_list<int64_t> dims) {
    return Tensor(numbers.data(), DType::kFloat32, dims);
  };
  CHECK_THROWS(InternalError, "weight has shape (3, 5), expected (3, 4)",
               backend->matmul(tensor({2, 4}), tensor({3, 5}), {}, tensor({2, 3})));
  CHECK_THROWS(InternalError, "out has shape (2, 2), expected (2, 3)",
               backend->matmul(tensor({2, 4}), tensor({3, 4}), {}, tensor({2, 2})));
  CHECK_THROWS(InternalError, "weight is bfloat16, expected float32",
               backend->rms_norm(tensor({2, 4}), Tensor(numbers.data(), DType::kBFloat16, {4}), 1e-6f, tensor({2, 4})));
  const Tensor half(numbers.data(), DType::kFloat16, {2, 4});
  CHECK_THROWS(InternalError, "not in float16",
               backend->rms_norm(half, Tensor(numbers.data(), DType::kFloat16, {4}), 1e-6f, half));
  const int32_t row = 2;
  CHECK_THROWS(InternalError, "row 2 of a tensor (2, 4)", backend->gather_rows(tensor({2, 4}), &row, tensor({1, 4})));
}

// ThreadSanitizer does not let the child of a fork start threads.
#if !defined(__SANITIZE_THREAD__)

// Calls fn in the child of a fork. True when it returned true within ten seconds.
template <typename Fn>
bool in_child(Fn&& fn) {
  const pid_t child = fork();
  if (child == 0) _exit(fn() ? 0 : 1);
  int status = 0;
  for (int i = 0; i < 1000; ++i) {
    if (waitpid(child, &status, WNOHANG) == child) return WIFEXITED(status) && WEXITSTATUS(status) == 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return false;
}

bool sums_up(ThreadPool& pool) {
  std::atomic<int64_t> sum{0};
  pool.parallel_for(1000, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sum += i;
  });
  return sum == 999 * 1000 / 2;
}

TEST(thread_pool_works_in_the_child_of_a_fork) {
  ThreadPool pool(3), unused(3);
  CHECK(sums_up(pool));
  CHECK(in_child([&] { return sums_up(pool) && sums_up(pool) && sums_up(unused); }));
  CHECK(in_child([&] { return in_child([&] { return sums_up(pool); }) && sums_up(pool); }));
  CHECK(sums_up(pool));
}

TEST(thread_pool_works_in_the_child_of_a_fork_in_the_middle_of_a_loop) {
  ThreadPool pool(2);
  std::atomic<bool> inside{false}, leave{false};
  std::thread other([&] {
    pool.parallel_for(2, 1, [&](int64_t, int64_t) {
      inside = true;
      while (!leave) std::this_thread::yield();
    });
  });
  while (!inside) std::this_thread::yield();
  CHECK(in_child([&] { return sums_up(pool); }));
  leave = true;
  other.join();
  CHECK(sums_up(pool));
}

#endif

TEST(read_bandwidth_is_a_speed) { CHECK(measure_read_bandwidth(2, int64_t{8} << 20) > 0.01); }

}  // namespace
}  // namespace tiny_vllm
