// The stream that everything runs on, in order, and the GPU it belongs to.
#pragma once

#include <optional>

#include "launch.h"

namespace tiny_vllm {

class OwnStream {
 public:
  // With `profile`, every launch is timed. Throws DeviceError when this build has no code for the GPU.
  explicit OwnStream(bool profile = false);
  ~OwnStream() { cudaStreamDestroy(stream_.handle); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  // To be called first in whatever a caller may do: each thread has a current device of its own.
  void use_device() const { TV_CUDA(cudaSetDevice(device_)); }

  int device() const { return device_; }
  const Stream& stream() const { return stream_; }
  KernelTimer* timer() { return stream_.timer; }  // null without a profile
  const cudaDeviceProp& properties() const { return properties_; }

 private:
  int device_ = 0;
  Stream stream_;
  std::optional<KernelTimer> timer_;
  cudaDeviceProp properties_{};
};

}  // namespace tiny_vllm
