// Times each CUDA kernel alone, at the sizes of Llama-3.2-1B, beside what the GPU's memory and tensor cores allow.
//
//   cmake -S . -B build/bench -G Ninja -DTINY_VLLM_BUILD_BENCHMARKS=ON
//   cmake --build build/bench --target cuda_kernels
//   build/bench/cuda_kernels [results.json] [WORD...]      only those with one of the words in their name
//
// Each row is the median of 20 replays of a CUDA graph that holds 20 calls. Inputs rotate through memory that is larger
// than the L2 cache where the real ones would not be in it.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "base/build_info.h"
#include "gemm.h"
#include "kernels/device.h"
#include "kernels/kernels.h"

namespace tiny_vllm {
namespace {

constexpr int kCalls = 20, kReplays = 20;

__global__ void fill_kernel(bfloat16* p, int64_t n, float scale) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u;
    h ^= h >> 13;
    h *= 0x5bd1e995u;
    h ^= h >> 15;
    p[i] = round_to<bfloat16>((static_cast<float>(h & 0xffff) / 32768 - 1) * scale);
  }
}

struct Bench {
  Stream stream;
  std::vector<void*> memory;
  std::string json;
  std::vector<std::string> words;

  Bench() {
    cudaDeviceProp p;
    TV_CUDA(cudaGetDeviceProperties(&p, 0));
    stream.num_sms = p.multiProcessorCount;
    stream.dependent_launch = p.major >= 9;
    const auto& built = build_info().cuda_architectures;
    stream.has_wgmma = p.major == 9 && p.minor == 0 && std::find(built.begin(), built.end(), "90a") != built.end();
    TV_CUDA(cudaStreamCreateWithFlags(&stream.handle, cudaStreamNonBlocking));
  }

  template <typename T>
  T* allocate(int64_t n) {
    void* p = nullptr;
    TV_CUDA(cudaMalloc(&p, static_cast<size_t>(n) * sizeof(T)));
    TV_CUDA(cudaMemset(p, 0, static_cast<size_t>(n) * sizeof(T)));
    memory.push_back(p);
    return static_cast<T*>(p);
  }
  bfloat16* random(int64_t n, float scale = 1) {
    bfloat16* p = allocate<bfloat16>(n);
    fill_kernel<<<1024, 256>>>(p, n, scale);
    TV_CUDA(cudaGetLastError());
    TV_CUDA(cudaDeviceSynchronize());
    return p;
  }
  template <typename T>
  T* copy_of(const std::vector<T>& v) {
    T* p = allocate<T>(static_cast<int64_t>(v.size()));
    TV_CUDA(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
  }
  void free_all() {
    for (void* p : memory) cudaFree(p);
    memory.clear();
  }

  // fn(i) is call i of kCalls.
  void time(const std::string& name, double bytes, double flops, const std::function<void(int)>& fn) {
    const auto is_in_name = [&](const std::string& word) { return name.find(word) != std::string::npos; };
    if (!words.empty() && std::none_of(words.begin(), words.end(), is_in_name)) return;
    for (int i = 0; i < 3; ++i) fn(i);
    TV_CUDA(cudaStreamSynchronize(stream.handle));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    TV_CUDA(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kCalls; ++i) fn(i);
    TV_CUDA(cudaStreamEndCapture(stream.handle, &graph));
    TV_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t start, stop;
    TV_CUDA(cudaEventCreate(&start));
    TV_CUDA(cudaEventCreate(&stop));
    std::vector<float> times;
    for (int i = 0; i < kReplays + 3; ++i) {
      TV_CUDA(cudaEventRecord(start, stream.handle));
      TV_CUDA(cudaGraphLaunch(exec, stream.handle));
      TV_CUDA(cudaEventRecord(stop, stream.handle));
      TV_CUDA(cudaEventSynchronize(stop));
      float ms = 0;
      TV_CUDA(cudaEventElapsedTime(&ms, start, stop));
      if (i >= 3) times.push_back(ms * 1e3f / kCalls);
    }
    std::sort(times.begin(), times.end());
    const double us = times[times.size() / 2];
    std::printf("%-52s %9.2f us  %8.1f GB/s  %7.1f TFLOP/s\n", name.c_str(), us, bytes / us / 1e3, flops / us / 1e6);
    std::fflush(stdout);
    char row[256];
    std::snprintf(row, sizeof row, "%s{\"name\": \"%s\", \"us\": %.3f, \"bytes\": %.0f, \"flops\": %.0f}",
                  json.empty() ? "" : ",\n  ", name.c_str(), us, bytes, flops);
    json += row;
    TV_CUDA(cudaGraphExecDestroy(exec));
    TV_CUDA(cudaGraphDestroy(graph));
    TV_CUDA(cudaEventDestroy(start));
    TV_CUDA(cudaEventDestroy(stop));
  }
};

constexpr int64_t D = 2048, F = 8192, V = 128256, H = 32, Hk = 8, Dh = 64, BS = 16;

void bench_products(Bench& b) {
  const std::vector<std::pair<const char*, std::pair<int64_t, int64_t>>> shapes = {
      {"qkv", {(H + 2 * Hk) * Dh, D}}, {"o", {D, D}}, {"gate_up", {2 * F, D}}, {"down", {D, F}}, {"lm_head", {V, D}}};
  Gemm gemm(b.stream);
  for (const auto& [name, nk] : shapes) {
    const auto [n, k] = nk;
    const int copies = static_cast<int>(std::clamp<int64_t>((int64_t{256} << 20) / (n * k * 2), 1, kCalls));
    bfloat16* weight = b.random(copies * n * k, 0.02f);
    for (const int64_t m : {1, 2, 8, 16, 32, 64, 256}) {
      if (m > 64 && n == V) continue;
      bfloat16* x = b.random(m * k);
      void* out = b.allocate<float>(m * n);
      const double bytes = 2.0 * n * k + 2.0 * m * (n + k), flops = 2.0 * m * n * k;
      const Tensor tx(x, DType::kBFloat16, {m, k}), to(out, DType::kBFloat16, {m, n});
      if (gemv_takes(m, n, k)) {
        b.time(std::string("gemv ") + name + " m=" + std::to_string(m), bytes, flops,
               [&](int i) { gemv(b.stream, x, weight + i % copies * n * k, nullptr, out, false, m, n, k); });
      }
      b.time(std::string("cublas ") + name + " m=" + std::to_string(m), bytes, flops, [&](int i) {
        gemm.matmul(tx, Tensor(weight + i % copies * n * k, DType::kBFloat16, {n, k}), Tensor(), to);
      });
    }
    b.free_all();
  }
  for (const auto& [name, nk] : shapes) {
    const auto [n, k] = nk;
    if (n == V) continue;
    const int64_t m = 8192;
    bfloat16 *weight = b.random(n * k, 0.02f), *x = b.random(m * k), *out = b.random(m * n);
    b.time(std::string("cublas ") + name + " m=8192", 2.0 * (n * k + m * (n + k)), 2.0 * m * n * k, [&](int) {
      gemm.matmul(Tensor(x, DType::kBFloat16, {m, k}), Tensor(weight, DType::kBFloat16, {n, k}), Tensor(),
                  Tensor(out, DType::kBFloat16, {m, n}));
    });
    b.free_all();
  }
}

void bench_attention(Bench& b, int64_t requests, int64_t tokens, int64_t context) {
  AttentionArgs<bfloat16> args;
  const int64_t width = (context + BS - 1) / BS, blocks = requests * width, T = requests * tokens;
  const int copies = static_cast<int>(std::clamp<int64_t>((int64_t{256} << 20) / (blocks * BS * Hk * Dh * 4), 1, 16));
  std::vector<int32_t> starts, contexts, tables;
  for (int64_t r = 0; r <= requests; ++r) starts.push_back(static_cast<int32_t>(r * tokens));
  for (int64_t r = 0; r < requests; ++r) contexts.push_back(static_cast<int32_t>(context));
  for (int64_t i = 0; i < blocks; ++i) tables.push_back(static_cast<int32_t>(i * 7919 % blocks));
  args.qkv = b.random(T * (H + 2 * Hk) * Dh);
  args.query_start = b.copy_of(starts);
  args.context_len = b.copy_of(contexts);
  args.block_tables = b.copy_of(tables);
  args.block_table_width = width;
  args.num_blocks = blocks;
  args.num_tokens = T;
  args.num_requests = requests;
  args.max_context = width * BS;
  args.shape = {H, Hk, Dh, BS, 0, 0.125f};
  const int64_t layer = blocks * Hk * BS * Dh;
  bfloat16 *keys = b.random(copies * layer), *values = b.random(copies * layer);
  args.out = b.allocate<bfloat16>(T * H * Dh);
  const DecodeScratch need = attention_decode_scratch(b.stream, requests, args.max_context, args.shape);
  float* partials = b.allocate<float>(need.partial_floats);
  unsigned* counters = b.allocate<unsigned>(need.counters);
  // A query sees on average context - tokens/2 keys.
  const double pairs = requests * tokens * (context - (tokens - 1) / 2.0) * H;
  const auto run = [&](const char* name, const std::function<void()>& kernel) {
    b.time(std::string(name) + " " + std::to_string(requests) + " x " + std::to_string(context),
           4.0 * requests * context * Hk * Dh + 4.0 * T * H * Dh, 4.0 * pairs * Dh, [&](int i) {
             args.keys = keys + i % copies * layer;
             args.values = values + i % copies * layer;
             kernel();
           });
  };
  if (tokens == 1) {
    run("attention_decode", [&] { attention_decode(b.stream, args, partials, counters); });
  } else {
    run("attention_prefill", [&] { attention_prefill(b.stream, args); });
    if (attention_prefill_hopper_takes(b.stream, args))
      run("attention_prefill_hopper", [&] { attention_prefill_hopper(b.stream, args); });
  }
  b.free_all();
}

void bench_small(Bench& b) {
  for (const int64_t t : {1, 16, 256, 8192}) {
    const std::string m = " m=" + std::to_string(t);
    bfloat16 *x = b.random(t * 2 * F), *y = b.random(t * F), *w = b.random(D), *residual = b.random(t * D);
    b.time("rms_norm" + m, 4.0 * t * D, 0, [&](int) { rms_norm<bfloat16>(b.stream, nullptr, x, w, 1e-5f, y, t, D); });
    b.time("add_rms_norm" + m, 8.0 * t * D, 0, [&](int) { rms_norm(b.stream, residual, x, w, 1e-5f, y, t, D); });
    b.time("act_mul" + m, 6.0 * t * F, 0, [&](int) { act_mul(b.stream, x, Activation::kSilu, y, t, F); });
    const std::vector<int32_t> ids(t, 5);
    int32_t* rows = b.copy_of(ids);
    bfloat16* table = b.random(1024 * D);
    b.time("embedding" + m, 4.0 * t * D, 0, [&](int) { gather_rows(b.stream, table, rows, y, t, D * 2); });
    RopeAndCacheArgs<bfloat16> rope;
    std::vector<int64_t> slots(t);
    for (int64_t i = 0; i < t; ++i) slots[i] = i;
    rope.qkv = x;
    rope.cos_sin = b.allocate<float>(t * Dh);
    rope.slot_mapping = b.copy_of(slots);
    rope.num_tokens = t;
    rope.shape = {H, Hk, Dh, BS, 0, 0.125f};
    rope.keys = b.random((t + BS) * Hk * Dh);
    rope.values = b.random((t + BS) * Hk * Dh);
    b.time("rope_and_cache" + m, 4.0 * t * (H + 2 * Hk) * Dh, 0, [&](int) { rope_and_cache(b.stream, rope); });
    b.free_all();
  }
}

int main_of(int argc, char** argv) {
  Bench b;
  std::string report;
  for (const std::string& argument : std::vector<std::string>(argv + 1, argv + argc)) {
    if (argument.ends_with(".json")) {
      report = argument;
    } else {
      b.words.push_back(argument);
    }
  }
  bench_small(b);
  bench_products(b);
  for (const int64_t c : {32, 160, 256, 1024, 4096, 32768}) bench_attention(b, 1, 1, c);
  for (const auto& [r, c] : {std::pair(16, 1024), {64, 1024}, {64, 4096}, {256, 256}, {256, 1024}, {256, 4096}})
    bench_attention(b, r, 1, c);
  for (const auto& [r, c] : {std::pair(1, 512), {1, 2048}, {1, 8192}, {1, 32768}, {16, 2048}, {4, 8192}})
    bench_attention(b, r, c, c);
  if (!report.empty()) {
    cudaDeviceProp p;
    TV_CUDA(cudaGetDeviceProperties(&p, 0));
    int driver = 0;
    TV_CUDA(cudaDriverGetVersion(&driver));
    std::ofstream(report) << "{\"device\": \"" << p.name << "\", \"driver_cuda_version\": " << driver
                          << ", \"kernels\": [\n  " << b.json << "\n]}\n";
  }
  return 0;
}

}  // namespace
}  // namespace tiny_vllm

int main(int argc, char** argv) {
  try {
    return tiny_vllm::main_of(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
