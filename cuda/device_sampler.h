// Tokens chosen on the device, and their way to the host.
#pragma once

#include "backend/step_batch.h"
#include "base/tensor.h"
#include "memory.h"

namespace tiny_vllm {

class DeviceSampler {
 public:
  DeviceSampler(const Stream& stream, Workspace& workspace) : stream_(stream), workspace_(workspace) {}

  // Makes room for a step, before any of its kernels is launched.
  void prepare(const DeviceBatch& batch);

  // Backend::sample(), send() and receive().
  void sample(const Tensor& logits, const DeviceBatch& batch, int64_t begin);
  int64_t send(int64_t n);
  Sampled receive(int64_t ticket);

  const int32_t* tokens() const { return tokens_.as<int32_t>(); }  // of the last step that sampled

  // Which of the kernels a step needs.
  struct Needs {
    bool tokens = false, sets = false, biases = false, penalties = false, filters = false, logprobs = false;
    bool raw() const { return logprobs && (sets || biases || penalties); }  // a copy of the logits
    auto operator<=>(const Needs&) const = default;
  };
  static Needs needs(const StepBatch& batch);

 private:
  struct Outgoing {
    Memory tokens{Memory::kPinned}, logprobs{Memory::kPinned};
    int64_t n = 0;
    bool has_logprobs = false;
    Event arrived;
  };

  const Stream& stream_;
  Workspace& workspace_;
  Needs needs_;  // of the step
  Memory tokens_{Memory::kDevice}, logprobs_{Memory::kDevice};
  Memory cuts_{Memory::kDevice}, partials_{Memory::kDevice}, counters_{Memory::kDevice};
  Memory last_tokens_{Memory::kDevice}, raw_{Memory::kDevice};
  Outgoing outgoing_[2];
  int64_t sent_ = 0;
};

}  // namespace tiny_vllm
