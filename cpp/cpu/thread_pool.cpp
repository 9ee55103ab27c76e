#include "cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"

namespace tiny_vllm {

namespace {

// How long a thread watches for the next loop before it sleeps. Longer than the serial work between two loops of a
// decode step, and short enough that an idle engine costs nothing.
constexpr auto kSpinTime = std::chrono::microseconds(50);

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns when `value` is no longer `old`: spins first, then sleeps in the kernel.
template <typename T>
void wait_while_equal(const std::atomic<T>& value, T old) {
  const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 32; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      pause_briefly();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

// CPUs that the cgroup lets this process use in one period, or 0 when there is no limit.
int cgroup_cpu_quota() {
  double quota = 0, period = 0;
  std::string first;
  if (std::ifstream v2("/sys/fs/cgroup/cpu.max"); v2 >> first >> period) {
    if (first == "max") return 0;
    quota = std::atof(first.c_str());
  } else {
    std::ifstream q("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), p("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
    if (!(q >> quota) || !(p >> period)) return 0;
  }
  return quota > 0 && period > 0 ? static_cast<int>(std::ceil(quota / period)) : 0;
}

}  // namespace

int available_cpus() {
  int cpus = 0;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cpus = CPU_COUNT(&set);
  if (cpus <= 0) cpus = static_cast<int>(std::thread::hardware_concurrency());
  const int quota = cgroup_cpu_quota();
  return std::max(1, quota > 0 ? std::min(cpus, quota) : cpus);
}

// The threads, and what they and the caller say to each other.
//
// A loop is `parts` calls of a task. Whoever is free takes the next part, the caller among them, and the caller leaves
// when all parts have ended. It does not wait for a worker that took none: on a busy machine one that sleeps may not
// run again for milliseconds. Such a latecomer may find the next loop already begun, so nothing of a loop is read
// before a part of it has been taken: from then on the loop cannot end without that part.
struct ThreadPool::Crew {
  Task task;
  int64_t parts = 0;

  alignas(64) std::atomic<int64_t> untaken{0};   // parts that nobody has taken
  alignas(64) std::atomic<uint32_t> unended{0};  // parts that have not ended
  alignas(64) std::atomic<uint32_t> epoch{0};    // grows with each loop: what idle workers watch
  std::atomic<bool> stopping{false};

  std::mutex failure_mutex;
  std::exception_ptr failure;

  std::vector<std::thread> threads;

  explicit Crew(int workers) {
    try {
      for (int i = 0; i < workers; ++i) threads.emplace_back([this] { work(); });
    } catch (const std::system_error& error) {
      const size_t started = threads.size();
      stop();
      throw DeviceError(str("thread ", started + 2, " of ", workers + 1, " could not be started (", error.what(),
                            "); lower num_threads"));
    }
  }

  ~Crew() { stop(); }

  void stop() {
    stopping = true;
    next_epoch();
    for (std::thread& t : threads) t.join();
  }

  void next_epoch() {
    epoch.fetch_add(1, std::memory_order_release);
    epoch.notify_all();
  }

  // Takes and does parts until none is left.
  void do_parts() noexcept {
    for (int64_t left = untaken.load(std::memory_order_acquire); left > 0;) {
      if (!untaken.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel, std::memory_order_acquire))
        continue;
      try {
        task.call(task.object, parts - left);
      } catch (...) {
        std::lock_guard lock(failure_mutex);
        if (!failure) failure = std::current_exception();
      }
      if (unended.fetch_sub(1, std::memory_order_acq_rel) == 1) unended.notify_one();
      left = untaken.load(std::memory_order_acquire);
    }
  }

  void work() {
    for (uint32_t seen = 0; !stopping.load(std::memory_order_acquire);) {
      do_parts();
      wait_while_equal(epoch, seen);
      seen = epoch.load(std::memory_order_acquire);
    }
  }

  void run(int64_t new_parts, Task new_task) {
    task = new_task;
    parts = new_parts;
    unended.store(static_cast<uint32_t>(parts), std::memory_order_relaxed);
    untaken.store(parts, std::memory_order_release);
    next_epoch();
    do_parts();
    for (uint32_t left; (left = unended.load(std::memory_order_acquire)) != 0;) wait_while_equal(unended, left);
    if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
  }
};

// All living pools, so that the child of a fork can make each forget the threads that it does not have.
struct ForkGuard {
  std::mutex mutex;
  ThreadPool* first = nullptr;

  static ForkGuard& instance() {
    static ForkGuard* guard = [] {
      pthread_atfork([] { instance().mutex.lock(); }, [] { instance().mutex.unlock(); },
                     [] {
                       instance().forget_threads();
                       instance().mutex.unlock();
                     });
      return new ForkGuard;  // never destroyed: a fork may come later than the static destructors
    }();
    return *guard;
  }

  void add(ThreadPool* pool) {
    std::lock_guard lock(mutex);
    pool->next_pool_ = first;
    first = pool;
  }

  void remove(ThreadPool* pool) {
    std::lock_guard lock(mutex);
    for (ThreadPool** p = &first; *p; p = &(*p)->next_pool_) {
      if (*p == pool) {
        *p = pool->next_pool_;
        return;
      }
    }
  }

  void forget_threads() {
    for (ThreadPool* pool = first; pool; pool = pool->next_pool_) {
      (void)
          pool->crew_.release();  // its threads do not exist here: there is nothing to join, and nothing to free safely
      pool->busy_.store(false, std::memory_order_relaxed);
    }
  }
};

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads > 0 ? num_threads : available_cpus()) {
  ForkGuard::instance().add(this);
}

ThreadPool::~ThreadPool() { ForkGuard::instance().remove(this); }

void ThreadPool::run(int64_t parts, Task task) {
  if (parts <= 1 || num_threads_ == 1 || busy_.exchange(true, std::memory_order_acquire)) {
    for (int64_t i = 0; i < parts; ++i) task.call(task.object, i);
    return;
  }
  struct Release {
    std::atomic<bool>& busy;
    ~Release() { busy.store(false, std::memory_order_release); }
  } release{busy_};
  if (!crew_) crew_ = std::make_unique<Crew>(num_threads_ - 1);
  crew_->run(parts, task);
}

}  // namespace tiny_vllm
