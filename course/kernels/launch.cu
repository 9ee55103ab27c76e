// The same arithmetic in many launches and in few, recorded and not: docs/course/20-cuda-graphs.md tells the story. The
// engine's recording is cuda/graph.h, and its fused kernels are in cuda/kernels/gemv.cu.
//
// Layer by layer, on vectors of n numbers:   x += silu(gate) · up
//
// Compiles with nvcc, and with g++ for a CPU (simt.h), where a recording is a list of calls: python -m tiny_vllm.course
// 20 does either.
#include <algorithm>
#include <chrono>
#include <functional>

#include "simt.h"

// A queue of launches that can be recorded, and counts what the host asks for.
class Stream {
 public:
  int launches = 0, kernels = 0;

#ifdef __CUDACC__
  Stream() {
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // what was copied before has arrived
    check(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~Stream() {
    if (recorded_) cudaGraphExecDestroy(recorded_);
    cudaStreamDestroy(handle_);
  }

  template <typename... Parameters, typename... Arguments>
  void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments) {
    kernel<<<grid, block, 0, handle_>>>(static_cast<Parameters>(arguments)...);
    check(cudaGetLastError(), "launch");
    if (!recording_) ++launches;
    ++kernels;
  }

  // What `work` launches is not run now, but noted.
  template <typename Work>
  void record(Work work) {
    recording_ = true;
    check(cudaStreamBeginCapture(handle_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    work();
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(handle_, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&recorded_, graph, 0), "cudaGraphInstantiate");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    recording_ = false;
  }
  void replay() {
    check(cudaGraphLaunch(recorded_, handle_), "cudaGraphLaunch");
    ++launches;
  }

  void upload(int* device, const int* host) {
    check(cudaMemcpyAsync(device, host, sizeof(int), cudaMemcpyHostToDevice, handle_), "cudaMemcpyAsync");
  }
  void wait() { check(cudaStreamSynchronize(handle_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t handle_ = nullptr;
  cudaGraphExec_t recorded_ = nullptr;
  bool recording_ = false;
#else
  template <typename... Parameters, typename... Arguments>
  void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments) {
    const auto call = [=] { ::launch(kernel, grid, block, arguments...); };  // with copies of the arguments
    ++kernels;
    if (recording_) return recorded_.push_back(call);
    ++launches;
    call();
  }

  // What `work` launches is not run now, but noted.
  template <typename Work>
  void record(Work work) {
    recording_ = true;
    work();
    recording_ = false;
  }
  void replay() {
    ++launches;
    for (const auto& call : recorded_) call();
  }

  void upload(int* device, const int* host) { *device = *host; }
  void wait() {}

 private:
  std::vector<std::function<void()>> recorded_;
  bool recording_ = false;
#endif
};

__device__ float silu(float x) { return x / (1 + expf(-x)); }

// 1. A kernel for each operation.
__global__ void act(const float* gate, float* room, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) room[i] = silu(gate[i]);
}
__global__ void multiply(const float* up, float* room, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) room[i] *= up[i];
}
__global__ void add(const float* room, float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] += room[i];
}

// 2. The three fused: what one hands to the next stays in a register.
__global__ void fused(const float* gate, const float* up, float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] += silu(gate[i]) * up[i];
}

// 3. All layers in one kernel. It works because a thread needs nothing of the others.
__global__ void all_layers(const float* gate, const float* up, float* x, int n, int layers) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float sum = x[i];
  for (int l = 0; l < layers; ++l) sum += silu(gate[int64_t(l) * n + i]) * up[int64_t(l) * n + i];
  x[i] = sum;
}

constexpr int kThreads = 256;

// x (n) += the sum over layers of silu(gate (layers, n)) · up (layers, n), by version 1 ... 3, recorded or not. counts:
// the host's launches of a step, and its kernels. *ms is the time of the fastest step, from the first launch to the
// end.
extern "C" const char* step(int version, int recorded, float* x, const float* gate, const float* up, int n, int layers,
                            int* counts, float* ms) {
  return report([&] {
    const DeviceArray<float> dx(x, n), room(n), dg(gate, size_t(layers) * n), du(up, size_t(layers) * n);
    const unsigned blocks = (n + kThreads - 1) / kThreads;
    Stream stream;
    const auto work = [&] {
      for (int l = 0; l < (version == 3 ? 1 : layers); ++l) {
        const float *g = dg.get() + int64_t(l) * n, *u = du.get() + int64_t(l) * n;
        if (version == 1) {
          stream.launch(act, blocks, kThreads, g, room.get(), n);
          stream.launch(multiply, blocks, kThreads, u, room.get(), n);
          stream.launch(add, blocks, kThreads, room.get(), dx.get(), n);
        } else if (version == 2) {
          stream.launch(fused, blocks, kThreads, g, u, dx.get(), n);
        } else {
          stream.launch(all_layers, blocks, kThreads, g, u, dx.get(), n, layers);
        }
      }
    };
    if (recorded) stream.record(work);
    counts[1] = stream.kernels;
    const auto run = [&] { recorded ? stream.replay() : work(); };
    run();
    stream.wait();
    dx.copy_to(x);
    counts[0] = stream.launches;
    if (!recorded) counts[1] = stream.kernels;
    *ms = 1e30f;
#ifdef __CUDACC__
    for (int i = 0; i < 20; ++i) {  // x grows on; nobody looks at it any more
      const auto start = std::chrono::steady_clock::now();
      run();
      stream.wait();
      *ms = std::min(*ms, std::chrono::duration<float, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
#endif
  });
}

// The mean of the first `length` numbers: a stand-in for attention, which reads a context that grows with each step.
__global__ void mean_by_argument(const float* x, int length, float* out) {
  float sum = 0;
  for (int i = 0; i < length; ++i) sum += x[i];
  *out = sum / length;
}
__global__ void mean_by_memory(const float* x, const int* length, float* out) {
  float sum = 0;
  for (int i = 0; i < *length; ++i) sum += x[i];
  *out = sum / *length;
}

// A step for each of lengths (steps): the first runs as it is, the second is recorded, and from then on the record is
// replayed. out (steps): the means that came out.
extern "C" const char* replayed_means(int in_memory, const float* x, int n, const int* lengths, int steps, float* out) {
  return report([&] {
    const DeviceArray<float> numbers(x, n), mean(1);
    const DeviceArray<int> length_in_memory(1);
    Stream stream;
    for (int s = 0; s < steps; ++s) {
      stream.upload(length_in_memory.get(), lengths + s);
      const auto work = [&] {
        if (in_memory) {
          stream.launch(mean_by_memory, 1, 1, numbers.get(), length_in_memory.get(), mean.get());
        } else {
          stream.launch(mean_by_argument, 1, 1, numbers.get(), lengths[s], mean.get());
        }
      };
      if (s == 0) {
        work();
      } else {
        if (s == 1) stream.record(work);
        stream.replay();
      }
      stream.wait();
      mean.copy_to(out + s);
    }
  });
}
