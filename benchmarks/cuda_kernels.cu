// Times each CUDA kernel alone, at the sizes of Llama-3.2-1B, beside what the GPU's memory and tensor cores allow.
//
// benchmarks/kernels.py builds it, runs it and makes a table of what it finds. By hand:
//
//   cmake -S . -B build/bench -G Ninja -DTINY_VLLM_BUILD_BENCHMARKS=ON
//   cmake --build build/bench --target cuda_kernels
//   build/bench/cuda_kernels [results.json] [--commit=NAME] [WORD...]    only those with one of the words in their name
//
// Each row is the median of 20 replays of a CUDA graph that holds 20 calls. Inputs rotate through memory that is larger
// than the L2 cache where the real ones would not be in it. Bytes are those that must move: the formula is at the head
// of each kernel's file.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/build_info.h"
#include "gemm.h"
#include "graph.h"
#include "kernels/device.h"
#include "kernels/kernels.h"

namespace tiny_vllm {
namespace {

constexpr int kCalls = 20, kReplays = 20;

template <typename T>
__global__ void fill_kernel(T* p, int64_t n, float scale) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u;
    h ^= h >> 13;
    h *= 0x5bd1e995u;
    h ^= h >> 15;
    p[i] = round_to<T>((static_cast<float>(h & 0xffff) / 32768 - 1) * scale);
  }
}

// The two ways to be bound by memory: reading alone, and reading as much as is written. Four vectors a thread in
// flight.
constexpr int kUnroll = 4;
__global__ void read_kernel(const uint4* from, int64_t n, uint32_t* out) {
  uint32_t sum = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x * kUnroll + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x * kUnroll) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint4 v = from[i + u * blockDim.x];
      sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
  }
  if (sum == 0x12345678) *out = sum;  // so that the compiler keeps the loop
}
__global__ void copy_kernel(const uint4* from, int64_t n, uint4* to) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x * kUnroll + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x * kUnroll) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = from[i + u * blockDim.x];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) to[i + u * blockDim.x] = v[u];
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
    TV_CUDA(cudaDeviceSynchronize());  // the stream does not wait for the default one
    memory.push_back(p);
    return static_cast<T*>(p);
  }
  template <typename T = bfloat16>
  T* random(int64_t n, float scale = 1) {
    T* p = allocate<T>(n);
    fill_kernel<<<1024, 256>>>(p, n, scale);
    TV_CUDA(cudaGetLastError());
    TV_CUDA(cudaDeviceSynchronize());
    return p;
  }
  template <typename T>
  T* copy_of(const std::vector<T>& v) {
    T* p = allocate<T>(static_cast<int64_t>(v.size()));
    TV_CUDA(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    TV_CUDA(cudaDeviceSynchronize());  // cudaMemcpy may return when the data have left the host, but not arrived
    return p;
  }
  void free_all() {
    for (void* p : memory) cudaFree(p);
    memory.clear();
  }

  // Microseconds of a call. fn(i) is call i of kCalls.
  double measure(const std::function<void(int)>& fn) {
    for (int i = 0; i < 3; ++i) fn(i);
    TV_CUDA(cudaStreamSynchronize(stream.handle));
    const Graph graph(stream.handle, [&] {
      for (int i = 0; i < kCalls; ++i) fn(i);
    });
    cudaEvent_t start, stop;
    TV_CUDA(cudaEventCreate(&start));
    TV_CUDA(cudaEventCreate(&stop));
    std::vector<float> times;
    for (int i = 0; i < kReplays + 3; ++i) {
      TV_CUDA(cudaEventRecord(start, stream.handle));
      graph.launch(stream.handle);
      TV_CUDA(cudaEventRecord(stop, stream.handle));
      TV_CUDA(cudaEventSynchronize(stop));
      float ms = 0;
      TV_CUDA(cudaEventElapsedTime(&ms, start, stop));
      if (i >= 3) times.push_back(ms * 1e3f / kCalls);
    }
    TV_CUDA(cudaEventDestroy(start));
    TV_CUDA(cudaEventDestroy(stop));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  void time(const std::string& name, double bytes, double flops, const std::function<void(int)>& fn) {
    const auto is_in_name = [&](const std::string& word) { return name.find(word) != std::string::npos; };
    if (!words.empty() && std::none_of(words.begin(), words.end(), is_in_name)) return;
    const double us = measure(fn);
    std::printf("%-52s %9.2f us  %8.1f GB/s  %7.1f TFLOP/s\n", name.c_str(), us, bytes / us / 1e3, flops / us / 1e6);
    std::fflush(stdout);
    char row[256];
    std::snprintf(row, sizeof row, "%s{\"name\": \"%s\", \"us\": %.3f, \"bytes\": %.0f, \"flops\": %.0f}",
                  json.empty() ? "" : ",\n  ", name.c_str(), us, bytes, flops);
    json += row;
  }
};

// What the GPU allows, in the same run as what the kernels reach: clocks and power differ from machine to machine.
struct Ceilings {
  double read_gb_s = 0, copy_gb_s = 0, gemm_tflop_s = 0;
};

Ceilings measure_ceilings(Bench& b) {
  constexpr int64_t kBytes = int64_t{1} << 30, kVectors = kBytes / 16, kSize = 8192;
  constexpr int kThreads = 512;
  static_assert(kVectors % (kThreads * kUnroll) == 0);
  Ceilings c;
  const dim3 blocks(static_cast<unsigned>(16 * b.stream.num_sms));
  const uint4* from = b.allocate<uint4>(kVectors);
  uint4* to = b.allocate<uint4>(kVectors);
  uint32_t* out = b.allocate<uint32_t>(1);
  c.read_gb_s = kBytes / 1e3 / b.measure([&](int) {
    read_kernel<<<blocks, kThreads, 0, b.stream.handle>>>(from, kVectors, out);
    TV_CUDA(cudaGetLastError());
  });
  c.copy_gb_s = 2 * kBytes / 1e3 / b.measure([&](int) {
    copy_kernel<<<blocks, kThreads, 0, b.stream.handle>>>(from, kVectors, to);
    TV_CUDA(cudaGetLastError());
  });
  b.free_all();

  Gemm gemm(b.stream);
  const auto square = [&](bfloat16* p) { return Tensor(p, DType::kBFloat16, {kSize, kSize}); };
  const Tensor x = square(b.random(kSize * kSize)), weight = square(b.random(kSize * kSize, 0.02f));
  const Tensor product = square(b.allocate<bfloat16>(kSize * kSize));
  c.gemm_tflop_s = 2.0 * kSize * kSize * kSize / 1e6 /
                   b.measure([&](int) { gemm.matmul(x, weight, Tensor(), product, Gemm::kStore); });
  b.free_all();
  std::printf("this GPU: %.0f GB/s read, %.0f GB/s copied, %.0f TFLOP/s (cuBLAS, bf16, 8192 x 8192 x 8192)\n",
              c.read_gb_s, c.copy_gb_s, c.gemm_tflop_s);
  return c;
}

constexpr int64_t D = 2048, F = 8192, V = 128256, H = 32, Hk = 8, Dh = 64, BS = 16;

void bench_products(Bench& b) {
  const std::vector<std::pair<const char*, std::pair<int64_t, int64_t>>> shapes = {
      {"qkv", {(H + 2 * Hk) * Dh, D}}, {"o", {D, D}}, {"gate_up", {2 * F, D}}, {"down", {D, F}}, {"lm_head", {V, D}}};
  Gemm gemm(b.stream);
  for (const auto& [name, nk] : shapes) {
    const auto [n, k] = nk;
    const int copies = static_cast<int>(std::clamp<int64_t>((int64_t{256} << 20) / (n * k * 2), 1, kCalls));
    const DType dtype = n == V ? DType::kFloat32 : DType::kBFloat16;  // logits are float32
    bfloat16 *weight = b.random(copies * n * k, 0.02f), *norm_weight = b.random(k);
    for (const int64_t m : {1, 2, 8, 16, 32, 64, 256, 2048, 8192}) {
      if (m > 256 && n == V) continue;  // only the last row of a prompt has logits
      bfloat16* x = b.random(m * k);
      const Tensor tx(x, DType::kBFloat16, {m, k}), out(b.allocate<float>(m * n), dtype, {m, n});
      const double bytes = 2.0 * n * k + 2.0 * m * k + static_cast<double>(out.nbytes()), flops = 2.0 * m * n * k;
      GemvArgs args;
      args.x = x;
      args.epilogue = dtype == DType::kFloat32 ? GemvArgs::kStoreFloat : GemvArgs::kStore;
      args.eps = 1e-5f;
      args.out = out.data;
      args.m = m;
      args.n = n;
      args.k = k;
      const auto time_gemv = [&](const char* what) {
        b.time(std::string(what) + " " + name + " m=" + std::to_string(m), bytes, flops, [&](int i) {
          args.weight = weight + i % copies * n * k;
          gemv(b.stream, args);
        });
      };
      if (gemv_takes(m, n, k)) time_gemv("gemv");
      if (n == 2 * F) args.epilogue = GemvArgs::kActMul;
      if (gemv_takes(m, n, k) && n == 2 * F) time_gemv("gemv_act_mul");
      args.norm_weight = norm_weight;
      if (gemv_norm_takes(m, n, k)) time_gemv(n == 2 * F ? "norm_gemv_act_mul" : "norm_gemv");
      const Gemm::Mode mode = k == F || n == D ? Gemm::kAdd : Gemm::kStore;  // o and down add to the residual stream
      b.time(std::string("cublas ") + name + " m=" + std::to_string(m), bytes, flops, [&](int i) {
        gemm.matmul(tx, Tensor(weight + i % copies * n * k, DType::kBFloat16, {n, k}), Tensor(), out, mode);
      });
    }
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

// m tokens: decodes of 1, 64 and 256 requests, and prompts.
void bench_small(Bench& b) {
  for (const int64_t t : {1, 64, 256, 2048, 8192}) {
    const std::string m = " m=" + std::to_string(t);
    bfloat16 *x = b.random(t * 2 * F), *y = b.random(t * F), *w = b.random(D);
    b.time("rms_norm" + m, 2.0 * (2 * t + 1) * D, 0, [&](int) { rms_norm(b.stream, x, w, 1e-5f, y, t, D); });
    b.time("act_mul" + m, 6.0 * t * F, 0, [&](int) { act_mul(b.stream, x, Activation::kSilu, y, t, F); });
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
    b.time("rope_and_cache" + m, 4.0 * t * (H + 2 * Hk) * Dh + 4.0 * t * Dh, 0,
           [&](int) { rope_and_cache(b.stream, rope); });
    b.free_all();
  }
}

// Rows of the embedding table for m tokens, and of the hidden states for m logits.
void bench_gather_rows(Bench& b) {
  const auto run = [&](const char* name, const bfloat16* table, int64_t rows, int64_t t) {
    std::vector<int32_t> ids(t);
    for (int64_t i = 0; i < t; ++i) ids[i] = static_cast<int32_t>((i * 104729 + 7919) % rows);
    const int32_t* numbers = b.copy_of(ids);
    bfloat16* out = b.allocate<bfloat16>(t * D);
    b.time(std::string("gather_rows ") + name + " m=" + std::to_string(t), 4.0 * t * D, 0,
           [&](int) { gather_rows(b.stream, table, numbers, out, t, D * 2); });
  };
  const bfloat16 *embedding = b.random(V * D), *hidden = b.random(256 * D);
  for (const int64_t t : {1, 64, 256, 2048, 8192}) run("embedding", embedding, V, t);
  for (const int64_t t : {1, 64, 256}) run("logits", hidden, 256, t);
  b.free_all();
}

// The logits have just been computed: those of a small batch are in the L2 cache, here and in a step. Bytes count one
// read of them.
void bench_sampling(Bench& b) {
  SampleRow greedy, plain, top_k, top_p, both;
  greedy.temperature = 0;
  top_k.top_k = both.top_k = 50;
  top_p.top_p = both.top_p = 0.9;
  const std::vector<std::pair<const char*, SampleRow>> ways = {
      {"greedy", greedy}, {"temperature", plain}, {"top_k", top_k}, {"top_p", top_p}, {"top_k+top_p", both}};
  for (const int64_t n : {1, 64, 256}) {
    const std::string m = " m=" + std::to_string(n);
    float* logits = b.random<float>(n * V, 10);
    SamplingArgs args;
    args.logits = logits;
    args.n = n;
    args.vocab_size = V;
    args.partials = b.allocate<char>(sampling_partial_bytes(b.stream, n));
    args.counters = b.allocate<unsigned>(n);
    args.tokens = b.allocate<int32_t>(n);
    uint64_t* cuts = b.allocate<uint64_t>(n);
    for (const auto& [name, row] : ways) {
      args.rows = b.copy_of(std::vector<SampleRow>(n, row));
      args.cuts = has_filter(row, V) ? cuts : nullptr;
      b.time(std::string("sample ") + name + m, 4.0 * n * V, 0, [&](int) { sample_rows(b.stream, args); });
    }

    SampleRow row;
    row.num_logprobs = 20;
    row.repetition_penalty = 1.1;
    LogprobsArgs probabilities;
    probabilities.logits = args.logits;
    probabilities.rows = b.copy_of(std::vector<SampleRow>(n, row));
    probabilities.tokens = b.copy_of(std::vector<int32_t>(n, 7919));
    probabilities.n = n;
    probabilities.vocab_size = V;
    probabilities.out = b.allocate<DeviceLogprob>(n * (kMaxLogprobs + 1));
    b.time("logprobs 20" + m, 4.0 * n * V, 0, [&](int) { logprobs(b.stream, probabilities); });

    constexpr int32_t kSaid = 1024;  // tokens that each request has said
    std::vector<TokenCount> counts;
    std::vector<int32_t> starts;
    for (int32_t i = 0; i < n * kSaid; ++i) counts.push_back({i % kSaid * 125, 1});
    for (int32_t r = 0; r <= n; ++r) starts.push_back(r * kSaid);
    PenaltyArgs penalties;
    penalties.logits = logits;
    penalties.rows = probabilities.rows;
    penalties.counts = b.copy_of(counts);
    penalties.starts = b.copy_of(starts);
    penalties.last_tokens = b.copy_of(std::vector<int32_t>(n, -1));
    penalties.n = n;
    penalties.vocab_size = V;
    b.time("penalize 1024" + m, 16.0 * n * kSaid, 0, [&](int) { penalize(b.stream, penalties); });
    b.free_all();
  }
}

std::string quoted(const std::string& text) {
  std::string s = "\"";
  for (const char c : text) s += c == '"' || c == '\\' || static_cast<unsigned char>(c) < ' ' ? '?' : c;
  return s + "\"";
}

// The version of the kernel driver; the CUDA runtime only knows which CUDA it supports.
std::string driver_version() {
  std::string version;
  if (FILE* pipe = popen("nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null", "r")) {
    for (int c = std::fgetc(pipe); c != EOF && c != '\n'; c = std::fgetc(pipe)) version += static_cast<char>(c);
    pclose(pipe);
  }
  return version.empty() ? "unknown" : version;
}

void write_report(const Bench& b, const Ceilings& c, const std::string& file, const std::string& commit) {
  cudaDeviceProp p;
  TV_CUDA(cudaGetDeviceProperties(&p, 0));
  int driver = 0;
  TV_CUDA(cudaDriverGetVersion(&driver));
  char date[16];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
  std::string architectures;
  for (const std::string& a : build_info().cuda_architectures) architectures += (architectures.empty() ? "" : ";") + a;
  std::ofstream out(file);
  out << "{\"device\": " << quoted(p.name) << ", \"driver\": " << quoted(driver_version())
      << ", \"driver_cuda_version\": " << driver << ", \"toolkit\": " << quoted(build_info().cuda_version)
      << ", \"architectures\": " << quoted(architectures) << ",\n \"commit\": " << quoted(commit)
      << ", \"date\": " << quoted(date) << ",\n \"ceilings\": {\"read_gb_s\": " << c.read_gb_s
      << ", \"copy_gb_s\": " << c.copy_gb_s << ", \"gemm_tflop_s\": " << c.gemm_tflop_s << "},\n \"kernels\": [\n  "
      << b.json << "\n]}\n";
  if (!out.flush()) throw std::runtime_error("cannot write " + file);
}

int main_of(int argc, char** argv) {
  Bench b;
  std::string report, commit = "unknown";
  for (const std::string& argument : std::vector<std::string>(argv + 1, argv + argc)) {
    if (argument.ends_with(".json")) {
      report = argument;
    } else if (argument.starts_with("--commit=")) {
      commit = argument.substr(9);
    } else {
      b.words.push_back(argument);
    }
  }
  const Ceilings ceilings = measure_ceilings(b);
  bench_gather_rows(b);
  bench_small(b);
  bench_products(b);
  for (const int64_t c : {32, 160, 256, 1024, 4096, 32768}) bench_attention(b, 1, 1, c);
  for (const auto& [r, c] : {std::pair(16, 1024), {64, 1024}, {64, 4096}, {256, 256}, {256, 1024}, {256, 4096}})
    bench_attention(b, r, 1, c);
  for (const auto& [r, c] : {std::pair(1, 512), {1, 2048}, {1, 8192}, {1, 32768}, {16, 2048}, {4, 8192}})
    bench_attention(b, r, c, c);
  bench_sampling(b);
  if (!report.empty()) write_report(b, ceilings, report, commit);
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
