// CUDA's threads on a CPU, or the real ones: the kernels of the course compile with both.
//
//   nvcc:  a thin layer over the runtime: launch(), DeviceArray, milliseconds_of().
//   g++:   blocks run one after the other, and the threads of a block take turns on one CPU thread. A thread runs until
//          it ends or waits at a barrier; then the next one runs, in an order that is shuffled anew each round. So a
//          barrier that is missing gives wrong numbers here too, and one that not all threads reach is reported.
//
// There is: threadIdx, blockIdx, blockDim, gridDim; __global__, __device__, __shared__ (of fixed size); __syncthreads,
// __syncwarp; __shfl_sync, __shfl_down_sync, __shfl_xor_sync (without a width); atomicAdd. Time on the CPU says nothing
// of a GPU, and "On a CPU" below says which mistakes only a GPU shows.
#pragma once

#include <math.h>

#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef __CUDACC__

#include <cuda_runtime.h>

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments) {
  kernel<<<grid, block>>>(static_cast<Parameters>(arguments)...);
  check(cudaGetLastError(), "launch");
}

// n elements of device memory.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t n) : n_(n) { check(cudaMalloc(&data_, n * sizeof(T)), "cudaMalloc"); }
  DeviceArray(const T* host, size_t n) : DeviceArray(n) {
    check(cudaMemcpy(data_, host, n * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy to the device");
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  T* get() const { return data_; }
  void copy_to(T* host) const {
    check(cudaMemcpy(host, data_, n_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy to the host");
  }

 private:
  T* data_ = nullptr;
  size_t n_;
};

// The shortest of some runs of `work`, which launches kernels.
template <typename Work>
float milliseconds_of(Work work, int runs = 20) {
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start), "cudaEventCreate");
  check(cudaEventCreate(&stop), "cudaEventCreate");
  float best = 1e30f;
  for (int run = 0; run < runs; ++run) {
    check(cudaEventRecord(start), "cudaEventRecord");
    work();
    check(cudaEventRecord(stop), "cudaEventRecord");
    check(cudaEventSynchronize(stop), "cudaEventSynchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start, stop), "cudaEventElapsedTime");
    if (ms < best) best = ms;
  }
  check(cudaEventDestroy(start), "cudaEventDestroy");
  check(cudaEventDestroy(stop), "cudaEventDestroy");
  return best;
}

#else

// On a CPU. These mistakes do no harm here: shared memory begins with zeros, and then has what the block before left in
// it. Threads may meet in different calls of __syncthreads. Between two barriers no thread comes between the steps of
// another. Addresses need not be aligned. A kernel may use memory of the host, and has ended when launch() returns.
// What it reads far outside of a DeviceArray goes unseen.

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <mutex>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static  // blocks run one after the other
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct alignas(16) float4 {
  float x, y, z, w;
};

using std::max;
using std::min;
inline float rsqrtf(float x) { return 1 / sqrtf(x); }

static dim3 gridDim, blockDim, blockIdx, threadIdx;  // of the thread that runs now; each library has its own

namespace simt {

constexpr int kWarp = 32;

enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kEnded };

// 512 KB, as much as a thread of a GPU may have. Below it is a page that nobody may touch: who needs more is stopped.
class Stack {
 public:
  static constexpr size_t kBytes = 512 << 10, kForbidden = 64 << 10;
  Stack() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, kForbidden + kBytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no memory for the stacks of the threads");
    memory_ = static_cast<char*>(memory);
    mprotect(memory_, kForbidden, PROT_NONE);
  }
  Stack(Stack&& other) noexcept : memory_(std::exchange(other.memory_, nullptr)) {}
  ~Stack() {
    if (memory_ != nullptr) munmap(memory_, kForbidden + kBytes);
  }
  char* begin() const { return memory_ + kForbidden; }

 private:
  char* memory_;
};

struct Thread {
  ucontext_t context;
  Stack stack;
  dim3 index;
  State state = State::kReady;
  unsigned mask = 0;  // the lanes that it waits for at a warp's barrier
};

struct Block {
  std::vector<Thread> threads;
  std::vector<int> order;
  std::vector<uint64_t> exchange;  // what each thread shows to its warp in a shuffle
  ucontext_t scheduler;
  int current = 0;
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
  uint32_t random = 1;
  std::exception_ptr thrown;  // by one of the threads
};
static Block block;
static std::mutex one_launch;  // at a time
static thread_local bool in_a_kernel = false;

inline void wait(State state, unsigned mask = 0) {
  Thread& self = block.threads[block.current];
  self.state = state;
  self.mask = mask;
  swapcontext(&self.context, &block.scheduler);
}

inline void thread_main() {
  try {
    block.body(block.argument);
  } catch (...) {
    block.thrown = std::current_exception();
  }
  block.threads[block.current].state = State::kEnded;
  swapcontext(&block.threads[block.current].context, &block.scheduler);
}

// Those at __syncthreads go on if all that have not ended are there.
inline bool release_block() {
  bool any = false;
  for (const Thread& t : block.threads) {
    if (t.state != State::kEnded && t.state != State::kAtBlockBarrier) return false;
    any |= t.state == State::kAtBlockBarrier;
  }
  for (Thread& t : block.threads)
    if (t.state == State::kAtBlockBarrier) t.state = State::kReady;
  return any;
}

// Those of a warp that wait for the lanes of a mask go on if all of these that have not ended wait for the same.
inline bool release_warp(int first) {
  const int lanes = std::min(kWarp, static_cast<int>(block.threads.size()) - first);
  Thread* warp = &block.threads[first];
  bool any = false;
  for (int i = 0; i < lanes; ++i) {
    if (warp[i].state != State::kAtWarpBarrier) continue;
    const unsigned mask = warp[i].mask;
    auto is_there = [&](int lane) {
      return !(mask >> lane & 1) || warp[lane].state == State::kEnded ||
             (warp[lane].state == State::kAtWarpBarrier && warp[lane].mask == mask);
    };
    bool all = true;
    for (int lane = 0; lane < lanes; ++lane) all &= is_there(lane);
    for (int lane = 0; lane < lanes && all; ++lane)
      if (mask >> lane & 1 && warp[lane].state == State::kAtWarpBarrier) warp[lane].state = State::kReady;
    any |= all;
  }
  return any;
}

inline void run_block() {
  const int n = static_cast<int>(block.threads.size());
  for (int i = 0; i < n; ++i) {
    Thread& t = block.threads[i];
    t.state = State::kReady;
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.begin();
    t.context.uc_stack.ss_size = Stack::kBytes;
    t.context.uc_link = nullptr;
    makecontext(&t.context, thread_main, 0);
  }
  while (true) {
    for (int i = n - 1; i > 0; --i) {  // another order each round
      block.random = block.random * 1664525u + 1013904223u;
      std::swap(block.order[i], block.order[(block.random >> 8) % (i + 1)]);
    }
    for (int i : block.order) {
      if (block.threads[i].state != State::kReady) continue;
      block.current = i;
      threadIdx = block.threads[i].index;
      swapcontext(&block.scheduler, &block.threads[i].context);
      if (block.thrown) std::rethrow_exception(std::exchange(block.thrown, nullptr));
    }
    bool released = release_block();
    for (int first = 0; first < n; first += kWarp) released |= release_warp(first);
    if (released) continue;
    if (std::all_of(block.threads.begin(), block.threads.end(), [](auto& t) { return t.state == State::kEnded; }))
      return;
    throw std::runtime_error(
        "deadlock: some threads of the block wait, at __syncthreads or for lanes of their warp, and others do not "
        "come");
  }
}

inline void wait_for_warp(unsigned mask) {
  if (!(mask >> block.current % kWarp & 1)) throw std::runtime_error("a thread is not in the mask that it gives");
  wait(State::kAtWarpBarrier, mask);
}

// The value that the thread `lane` of this warp shows; the own value if there is no such thread.
template <typename T>
T exchange(unsigned mask, T value, int lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  const int self = block.current, first = self / kWarp * kWarp;
  std::memcpy(&block.exchange[self], &value, sizeof(T));
  wait_for_warp(mask);
  const int other = first + lane;
  if (lane >= 0 && lane < kWarp && other < static_cast<int>(block.threads.size()))
    std::memcpy(&value, &block.exchange[other], sizeof(T));
  wait_for_warp(mask);  // nobody shows something new before all have looked
  return value;
}

inline int lane_of_current() { return block.current % kWarp; }

}  // namespace simt

inline void __syncthreads() { simt::wait(simt::State::kAtBlockBarrier); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { simt::wait_for_warp(mask); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return simt::exchange(mask, value, lane & (simt::kWarp - 1));
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return simt::exchange(mask, value, simt::lane_of_current() ^ bits);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance) {
  return simt::exchange(mask, value, simt::lane_of_current() + static_cast<int>(distance));
}

template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {  // threads only take turns at barriers
  const T old = *address;
  *address += value;
  return old;
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block_shape, Arguments... arguments) {
  if (simt::in_a_kernel) throw std::runtime_error("launch: a kernel cannot launch another one");
  const uint64_t all = uint64_t(block_shape.x) * block_shape.y * block_shape.z;
  if (all == 0 || block_shape.x > 1024 || block_shape.y > 1024 || all > 1024)
    throw std::runtime_error("launch: a block has 1 to 1024 threads");
  if (block_shape.z > 64) throw std::runtime_error("launch: a block has at most 64 threads along z");
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
    throw std::runtime_error("launch: a grid has 1 to 2147483647 blocks along x, 1 to 65535 along y and z");
  const std::lock_guard<std::mutex> lock(simt::one_launch);
  const unsigned threads = static_cast<unsigned>(all);
  auto body = [&] { kernel(static_cast<Parameters>(arguments)...); };
  simt::Block& block = simt::block;
  block.threads.resize(threads);
  block.exchange.assign(threads, 0);
  block.order.resize(threads);
  for (unsigned i = 0; i < threads; ++i) {
    block.order[i] = static_cast<int>(i);
    block.threads[i].index =
        dim3(i % block_shape.x, i / block_shape.x % block_shape.y, i / block_shape.x / block_shape.y);
  }
  block.body = [](void* f) { (*static_cast<decltype(body)*>(f))(); };
  block.argument = &body;
  gridDim = grid;
  blockDim = block_shape;
  struct Inside {
    Inside() { simt::in_a_kernel = true; }
    ~Inside() { simt::in_a_kernel = false; }
  } inside;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        simt::run_block();
      }
}

// n elements, and on both sides bytes that nobody may change. These, and what nobody has filled, are NaN as floats, of
// a kind that is another NaN after any arithmetic, and as whole numbers they are negative.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t n) : bytes_(n * sizeof(T) + 2 * kEdge), n_(n) {
    for (size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = untouched(i);
  }
  DeviceArray(const T* host, size_t n) : DeviceArray(n) {
    if (n > 0) std::memcpy(get(), host, n * sizeof(T));
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* get() const { return reinterpret_cast<T*>(const_cast<unsigned char*>(bytes_.data()) + kEdge); }
  void copy_to(T* host) const {
    for (size_t i = 0; i < kEdge; ++i) {
      const size_t behind = bytes_.size() - kEdge + i;
      if (bytes_[i] != untouched(i)) throw std::runtime_error("a kernel wrote before the beginning of an array");
      if (bytes_[behind] != untouched(behind))
        throw std::runtime_error("a kernel wrote behind the end of an array of " + std::to_string(n_) + " elements");
    }
    if (n_ > 0) std::memcpy(host, get(), n_ * sizeof(T));
  }

 private:
  static constexpr size_t kEdge = 4096;
  static unsigned char untouched(size_t i) { return i % 4 == 3 ? 0xff : 0xa5; }
  std::vector<unsigned char> bytes_;
  size_t n_;
};

template <typename Work>
float milliseconds_of(Work work, int = 1) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<float, std::milli>(std::chrono::steady_clock::now() - start).count();
}

#endif

// Runs `work` for a caller in another language: nullptr when all went well, and else what went wrong.
template <typename Work>
const char* report(Work work) {
  static thread_local std::string message;
  try {
    work();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
  } catch (...) {
    message = "something that is no std::exception was thrown";
  }
  return message.c_str();
}
