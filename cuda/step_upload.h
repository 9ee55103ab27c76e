// Brings the arrays of a step to the device, with one copy from pinned memory.
#pragma once

#include <optional>

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
  struct Staging {
    Memory memory{Memory::kPinned};
    Event copied;
  };

  const Stream& stream_;
  Workspace& workspace_;
  Staging staging_[2];  // one is filled while the other may still be read
  int next_ = 0;
  Memory device_{Memory::kDevice};
};

}  // namespace tiny_vllm
