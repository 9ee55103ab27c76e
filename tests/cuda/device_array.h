// Arrays on the device, and the stream that the tests of kernels launch into.
#pragma once

#include <cstdint>
#include <iterator>
#include <vector>

#include "cuda_check.h"
#include "launch.h"

namespace tiny_vllm {

inline Stream make_stream() {
  Stream stream;
  cudaDeviceProp p;
  TV_CUDA(cudaGetDeviceProperties(&p, 0));
  stream.num_sms = p.multiProcessorCount;
  stream.dependent_launch = p.major >= 9;
  stream.has_wgmma = p.major == 9 && p.minor == 0;
  TV_CUDA(cudaStreamCreateWithFlags(&stream.handle, cudaStreamNonBlocking));
  return stream;
}

inline const Stream& stream() {
  static const Stream the_stream = make_stream();
  return the_stream;
}

// Elements on the device, every byte 0x7f: a large number that an op which reads the wrong place would bring along.
template <typename T>
class Array {
 public:
  explicit Array(int64_t n) {
    TV_CUDA(cudaMalloc(&data_, static_cast<size_t>(n) * sizeof(T)));
    TV_CUDA(cudaMemsetAsync(data_, 0x7f, static_cast<size_t>(n) * sizeof(T), stream().handle));
    TV_CUDA(cudaStreamSynchronize(stream().handle));
  }
  explicit Array(const std::vector<T>& v) : Array(std::ssize(v)) { set(0, v); }
  ~Array() { cudaFree(data_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T* data() const { return data_; }
  // cudaMemcpy() alone would not do: it may return when the data have left the host, but not arrived.
  void set(int64_t at, const std::vector<T>& v) {
    TV_CUDA(cudaMemcpyAsync(data_ + at, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice, stream().handle));
    TV_CUDA(cudaStreamSynchronize(stream().handle));
  }
  std::vector<T> get(int64_t at, int64_t n) const {
    std::vector<T> v(static_cast<size_t>(n));
    TV_CUDA(cudaStreamSynchronize(stream().handle));
    TV_CUDA(cudaMemcpy(v.data(), data_ + at, v.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }

 private:
  T* data_ = nullptr;
};

}  // namespace tiny_vllm
