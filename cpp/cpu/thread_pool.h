// A small crew of threads that splits one loop at a time.
//
// The caller takes part in its own loop. Workers spin for a moment between loops, because the next matmul of a forward
// pass is a few microseconds away, and then sleep. What a loop computes never depends on how it was split: every index
// is handled once, by one thread, and the loops of this engine write disjoint outputs.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

namespace tiny_vllm {

// The processors that this process may use: its affinity mask, and its cgroup CPU quota rounded up.
int available_cpus();

class ThreadPool {
 public:
  // num_threads counts the caller; 0 means available_cpus(). Workers start with the first loop that needs them.
  explicit ThreadPool(int num_threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // fn(begin, end) over contiguous parts of [0, n), none smaller than `grain` unless n is. There are a few parts for
  // each thread, and whoever is done takes the next: cores are not equally fast, and some are busy with other things.
  // An exception of fn reaches the caller, after all parts have ended.
  // A loop inside a loop, or from a second caller at the same time, runs on its own thread alone.
  template <typename Fn>
  void parallel_for(int64_t n, int64_t grain, Fn&& fn) {
    if (n <= 0) return;
    const int64_t most = num_threads_ == 1 ? 1 : kPartsPerThread * num_threads_;
    const int64_t parts = std::clamp<int64_t>(n / std::max<int64_t>(1, grain), 1, most);
    auto part = [&](int64_t i) { fn(n * i / parts, n * (i + 1) / parts); };
    run(parts, Task::of(part));
  }

  // fn(index) for each of [0, n), handed out one at a time: for few items of unequal cost.
  template <typename Fn>
  void parallel_items(int64_t n, Fn&& fn) {
    auto part = [&](int64_t i) { fn(i); };
    run(n, Task::of(part));
  }

 private:
  // A borrowed callable: a pointer to it and how to call it. std::function would allocate on every loop.
  struct Task {
    void* object = nullptr;
    void (*call)(void* object, int64_t part) = nullptr;

    template <typename Fn>
    static Task of(Fn& fn) {
      return {&fn, [](void* object, int64_t part) { (*static_cast<Fn*>(object))(part); }};
    }
  };
  struct Crew;

  static constexpr int64_t kPartsPerThread = 4;

  void run(int64_t parts, Task task);

  const int num_threads_;
  std::atomic<bool> busy_{false};
  std::unique_ptr<Crew> crew_;  // started by the first run()

  // fork() copies this object but not its threads. The child forgets the crew and starts another when it needs one.
  friend struct ForkGuard;
  ThreadPool* next_pool_ = nullptr;
};

}  // namespace tiny_vllm
