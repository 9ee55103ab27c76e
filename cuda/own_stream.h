// The stream that everything runs on, in order, and the GPU it belongs to.
#pragma once

#include "launch.h"

namespace tiny_vllm {

class OwnStream {
 public:
  // Throws DeviceError when this build has no code for the GPU.
  OwnStream();
  ~OwnStream() { cudaStreamDestroy(stream_.handle); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  const Stream& stream() const { return stream_; }
  const cudaDeviceProp& properties() const { return properties_; }

 private:
  Stream stream_;
  cudaDeviceProp properties_{};
};

}  // namespace tiny_vllm
