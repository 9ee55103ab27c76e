// A CUDA graph: a recording of calls that one launch replays. It spares the host the launches, and the GPU the gaps
// between them.
#pragma once

#include <functional>

#include "cuda_check.h"

namespace tiny_vllm {

class Graph {
 public:
  // Records what `ops` does on the stream, without running it.
  Graph(cudaStream_t stream, const std::function<void()>& ops) {
    TV_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    cudaGraph_t graph = nullptr;
    try {
      ops();
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);  // leave the stream usable; what was thrown says more than this call
      if (graph) cudaGraphDestroy(graph);
      throw;
    }
    TV_CUDA(cudaStreamEndCapture(stream, &graph));
    const cudaError_t error = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    check_cuda(error, "cudaGraphInstantiate");
  }
  ~Graph() { cudaGraphExecDestroy(executable_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(cudaStream_t stream) const { TV_CUDA(cudaGraphLaunch(executable_, stream)); }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace tiny_vllm
