// CUDA's threads on a CPU, or the real ones: the kernels of the course compile with both.
//
//   nvcc:  a thin layer over the runtime: launch(), DeviceArray, milliseconds_of().
//   g++:   blocks run one after the other, and the threads of a block take turns on one CPU thread. A thread runs
//          until it ends or waits at a barrier; then the next one runs, in an order that is shuffled anew each round.
//          So a barrier that is missing gives wrong numbers here too, and one that not all threads reach is reported.
//
// There is: threadIdx, blockIdx, blockDim, gridDim; __global__, __device__, __shared__ (of fixed size); __syncthreads,
// __syncwarp; __shfl_sync, __shfl_down_sync, __shfl_xor_sync; atomicAdd. Time on the CPU says nothing of a GPU.
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

#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <cstring>

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

inline dim3 gridDim, blockDim, blockIdx, threadIdx;  // of the thread that runs now

namespace simt {

constexpr int kWarp = 32;

enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kEnded };

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(64 << 10);
  dim3 index;
  State state = State::kReady;
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
};
inline Block block;

inline void wait(State state) {
  Thread& self = block.threads[block.current];
  self.state = state;
  swapcontext(&self.context, &block.scheduler);
}

inline void thread_main() {
  block.body(block.argument);
  block.threads[block.current].state = State::kEnded;
  swapcontext(&block.threads[block.current].context, &block.scheduler);
}

// Those that wait go on if all of [begin, end) that have not ended wait at the same kind of barrier.
inline bool release(int begin, int end, State barrier) {
  bool any = false;
  for (int i = begin; i < end; ++i) {
    if (block.threads[i].state == State::kEnded) continue;
    if (block.threads[i].state != barrier) return false;
    any = true;
  }
  for (int i = begin; i < end && any; ++i)
    if (block.threads[i].state == barrier) block.threads[i].state = State::kReady;
  return any;
}

inline void run_block() {
  const int n = static_cast<int>(block.threads.size());
  for (int i = 0; i < n; ++i) {
    Thread& t = block.threads[i];
    t.state = State::kReady;
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.data();
    t.context.uc_stack.ss_size = t.stack.size();
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
    }
    bool released = release(0, n, State::kAtBlockBarrier);
    for (int first = 0; first < n; first += kWarp)
      released |= release(first, std::min(first + kWarp, n), State::kAtWarpBarrier);
    if (released) continue;
    if (std::all_of(block.threads.begin(), block.threads.end(), [](auto& t) { return t.state == State::kEnded; }))
      return;
    throw std::runtime_error("deadlock: some threads of the block wait at __syncthreads and others do not come");
  }
}

// The value that the thread `lane` of this warp shows; the own value if there is no such thread.
template <typename T>
T exchange(T value, int lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  const int self = block.current, first = self / kWarp * kWarp;
  std::memcpy(&block.exchange[self], &value, sizeof(T));
  wait(State::kAtWarpBarrier);
  const int other = first + lane;
  if (lane >= 0 && lane < kWarp && other < static_cast<int>(block.threads.size()))
    std::memcpy(&value, &block.exchange[other], sizeof(T));
  wait(State::kAtWarpBarrier);  // nobody shows something new before all have looked
  return value;
}

inline int lane_of_current() { return block.current % kWarp; }

}  // namespace simt

inline void __syncthreads() { simt::wait(simt::State::kAtBlockBarrier); }
inline void __syncwarp(unsigned = 0xffffffffu) { simt::wait(simt::State::kAtWarpBarrier); }

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return simt::exchange(value, lane % simt::kWarp);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return simt::exchange(value, simt::lane_of_current() ^ mask);
}
template <typename T>
T __shfl_down_sync(unsigned, T value, unsigned distance) {
  return simt::exchange(value, simt::lane_of_current() + static_cast<int>(distance));
}

template <typename T>
T atomicAdd(T* address, T value) {  // threads only take turns at barriers
  const T old = *address;
  *address += value;
  return old;
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block_shape, Arguments... arguments) {
  const unsigned threads = block_shape.x * block_shape.y * block_shape.z;
  if (threads == 0 || threads > 1024) throw std::runtime_error("launch: a block has 1 to 1024 threads");
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
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        simt::run_block();
      }
}

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t n) : data_(n) {}
  DeviceArray(const T* host, size_t n) : data_(host, host + n) {}
  T* get() const { return const_cast<T*>(data_.data()); }
  void copy_to(T* host) const { std::copy(data_.begin(), data_.end(), host); }

 private:
  std::vector<T> data_;
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
    return message.c_str();
  }
}
