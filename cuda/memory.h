// Memory of the device, and pinned memory of the host, that frees itself and can grow.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>

#include "launch.h"

namespace tiny_vllm {

class Memory {
 public:
  enum Kind { kDevice, kPinned };
  explicit Memory(Kind kind, int64_t bytes = 0) : kind_(kind), bytes_(bytes) {
    if (bytes == 0) return;
    if (kind == kDevice) {
      TV_CUDA(cudaMalloc(&data_, static_cast<size_t>(bytes)));
    } else {
      TV_CUDA(cudaMallocHost(&data_, static_cast<size_t>(bytes)));
    }
  }
  ~Memory() { kind_ == kDevice ? cudaFree(data_) : cudaFreeHost(data_); }
  Memory(Memory&& other) noexcept : kind_(other.kind_) { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }

  Kind kind() const { return kind_; }
  int64_t bytes() const { return bytes_; }
  template <typename T = char>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void swap(Memory& other) {
    std::swap(kind_, other.kind_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  Kind kind_;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Makes room in memories that the kernels of one stream use.
class Workspace {
 public:
  explicit Workspace(const Stream& stream) : stream_(stream) {}

  enum class Fill { kUndefined, kZero, kKeep };  // what is in the memory after it has grown; kKeep: the old, then 0
  void reserve(Memory& memory, int64_t bytes, Fill fill = Fill::kUndefined) {
    if (bytes <= memory.bytes()) return;
    bytes = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)));  // to grow rarely
    TV_CUDA(cudaStreamSynchronize(stream_.handle));  // kernels under way still use the old memory
    if (memory.kind() == Memory::kDevice) ++moves_;
    if (fill != Fill::kKeep) memory = Memory(memory.kind());  // first give, then take
    Memory larger(memory.kind(), bytes);
    if (fill != Fill::kUndefined) TV_CUDA(cudaMemsetAsync(larger.as(), 0, static_cast<size_t>(bytes), stream_.handle));
    if (memory.bytes() > 0) {
      TV_CUDA(cudaMemcpyAsync(larger.as(), memory.as(), static_cast<size_t>(memory.bytes()), cudaMemcpyDefault,
                              stream_.handle));
      TV_CUDA(cudaStreamSynchronize(stream_.handle));
    }
    memory = std::move(larger);
  }

  // How often memory of the device has moved: whoever has kept an address has to look again when this has changed.
  int64_t moves() const { return moves_; }

 private:
  const Stream& stream_;
  int64_t moves_ = 0;
};

// A moment in a stream that the host can wait for. Waiting for one that was never recorded is over at once.
class Event {
 public:
  Event() { TV_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(const Stream& stream) { TV_CUDA(cudaEventRecord(event_, stream.handle)); }
  void wait() { TV_CUDA(cudaEventSynchronize(event_)); }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace tiny_vllm
