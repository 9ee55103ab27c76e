// Brings the arrays of a step to the device, with one copy from pinned memory; and those whose size is anybody's guess
// with one copy each, so that every array of a recorded step stays where it is.
#pragma once

#include <optional>
#include <vector>

#include "backend/step_batch.h"
#include "memory.h"

namespace tiny_vllm {

class StepUpload {
 public:
  StepUpload(const Stream& stream, Workspace& workspace) : stream_(stream), workspace_(workspace) {}

  // To what a step of decodes is filled up, so that its arrays lie where those of the last such step lay.
  struct Padding {
    int64_t rows = 0;  // tokens, requests and rows of logits alike
    int64_t block_table_width = 0;
  };

  // Throws InternalError when the sizes of the arrays contradict each other. Does not wait for the device, unless it is
  // two steps behind.
  DeviceBatch upload(const StepBatch& batch, const std::optional<Padding>& padding);

 private:
  // A place on the device, and two in pinned memory: one is filled while the other may still be read.
  struct Channel {
    struct Staging {
      Memory memory{Memory::kPinned};
      Event copied;
    };
    Staging staging[2];
    int next = 0;
    Memory device{Memory::kDevice};
  };
  char* begin(Channel& channel, int64_t bytes);       // where the host writes
  const char* send(Channel& channel, int64_t bytes);  // where the device finds it
  template <typename T>
  const T* upload(Channel& channel, const std::vector<T>& values);

  const Stream& stream_;
  Workspace& workspace_;
  Channel fixed_, token_counts_, token_biases_, allowed_;
};

}  // namespace tiny_vllm
