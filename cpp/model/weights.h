// The weights of a model on a device, fused the way the forward pass multiplies them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "model/config.h"

namespace tiny_vllm {

class Checkpoint;

struct LayerWeights {
  Tensor attn_norm;     // (D)
  Tensor qkv;           // ((H+2Hk)·Dh, D)  rows of q, then k, then v: one product instead of three
  Tensor qkv_bias;      // ((H+2Hk)·Dh)     undefined when the family has none, like every bias here
  Tensor q_norm;        // (Dh)             Qwen3 only
  Tensor k_norm;        // (Dh)             Qwen3 only
  Tensor o;             // (D, H·Dh)
  Tensor o_bias;        // (D)
  Tensor mlp_norm;      // (D)
  Tensor gate_up;       // (2F, D)          rows of gate, then up
  Tensor gate_up_bias;  // (2F)
  Tensor down;          // (D, F)
  Tensor down_bias;     // (D)
};

struct Weights {
  Tensor embedding;  // (V, D)
  std::vector<LayerWeights> layers;
  Tensor final_norm;  // (D)
  Tensor lm_head;     // (V, D)  the same memory as embedding when they are tied
  Buffer memory;      // one allocation that holds all of the above
  int64_t num_parameters = 0;
  int64_t bytes = 0;
  std::vector<std::string> notes;  // what a person should know about the files: tensors that were not used
};

// Called with (bytes done, bytes in all). May throw to stop the load; nothing is leaked then.
using LoadProgress = std::function<void(int64_t, int64_t)>;

// Reads a checkpoint folder's tensors, converts them to `dtype` and uploads them.
// Throws ModelLoadError naming every missing tensor, or the first of the wrong shape or type.
Weights load_weights(const ModelConfig& config, const Checkpoint& checkpoint, DType dtype, Backend& backend,
                     const LoadProgress& progress);

// Random weights from config.json alone: uniform with standard deviation 0.02, norms 1. The same seed gives the same
// numbers on every device.
Weights dummy_weights(const ModelConfig& config, DType dtype, uint64_t seed, Backend& backend,
                      const LoadProgress& progress);

}  // namespace tiny_vllm
