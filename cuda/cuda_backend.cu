// The ops of backend.h on an NVIDIA GPU: one stream, checked shapes, and for each op the kernel that suits it.
#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "backend/backend.h"
#include "backend/checks.h"
#include "backend/cuda_devices.h"
#include "device_sampler.h"
#include "gemm.h"
#include "graph.h"
#include "kernels/kernels.h"
#include "own_stream.h"
#include "step_upload.h"

namespace tiny_vllm {
namespace {

constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kMaxTensorCoreHeadDim = 256;

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(const BackendOptions& options)
      : own_stream_(options.profile), gemm_(stream()), use_graphs_(!options.enforce_eager && !options.profile) {}

  // All that is under way ends before its memory goes.
  ~CudaBackend() override {
    cudaSetDevice(own_stream_.device());
    release_profiled();
    cudaStreamSynchronize(stream().handle);
  }

  std::string description() const override {
    const cudaDeviceProp& p = own_stream_.properties();
    return str("cuda, ", p.name, ", compute capability ", p.major, ".", p.minor);
  }

  MemoryInfo memory() const override {
    own_stream_.use_device();
    size_t free = 0, total = 0;
    TV_CUDA(cudaMemGetInfo(&free, &total));
    return {static_cast<int64_t>(total), static_cast<int64_t>(free)};
  }

  BackendDefaults defaults() const override {
    return {.memory_utilization = 0.9, .max_num_seqs = 256, .max_num_batched_tokens = 8192};
  }

  int64_t padded_rows(int64_t rows) const override { return padded_size(rows); }

  Buffer allocate(int64_t bytes) override {
    own_stream_.use_device();
    void* data = nullptr;
    const cudaError_t error = cudaMalloc(&data, static_cast<size_t>(std::max<int64_t>(1, bytes)));
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      const MemoryInfo m = memory();
      throw OutOfMemoryError(str(
          "wanted ", bytes >> 20, " MiB of the GPU's memory, ", m.available_bytes >> 20, " of ", m.total_bytes >> 20,
          " MiB are free (nvidia-smi shows who holds the rest); lower ",
          "kv_cache_memory_bytes, max_model_len, max_num_seqs or max_num_batched_tokens, or use ", "a smaller model"));
    }
    check_cuda(error, "cudaMalloc");
    Buffer buffer(data, [](void* p) { cudaFree(p); });
    // Nothing depends on it. But compute-sanitizer does not see what cuBLAS writes through the copy engine, nor that
    // nobody looks at the unused part of a block that is copied, and could not tell a real fault from these.
    TV_CUDA(cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), stream().handle));
    return buffer;
  }

  void upload(void* device, const void* host, int64_t bytes) override {
    if (bytes == 0) return;
    own_stream_.use_device();
    release_profiled();
    TV_CUDA(cudaMemcpyAsync(device, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream().handle));
    synchronize();  // the caller may give the host's memory back
  }
  void download(void* host, const void* device, int64_t bytes) override {
    if (bytes == 0) return;
    own_stream_.use_device();
    release_profiled();
    TV_CUDA(cudaMemcpyAsync(host, device, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream().handle));
    synchronize();
  }
  void synchronize() override {
    release_profiled();
    TV_CUDA(cudaStreamSynchronize(stream().handle));
  }

  // A step of decodes alone is padded to one of a few shapes, so that its calls can be recorded and replayed.
  DeviceBatch upload(const StepBatch& batch) override {
    own_stream_.use_device();
    release_profiled();
    const int64_t tokens = batch.num_tokens(), requests = batch.num_requests();
    num_decodes_ = 0;
    for (int64_t r = 0; r < requests; ++r) num_decodes_ += batch.query_start[r + 1] - batch.query_start[r] == 1;
    num_prefills_ = requests - num_decodes_;
    shape_.reset();
    std::optional<StepUpload::Padding> padding;
    if (use_graphs_ && num_prefills_ == 0 && tokens <= kMaxGraphTokens && std::ssize(batch.logits_rows) == tokens &&
        !batch.cos_sin.empty()) {
      padding = {padded_size(tokens), padded_width(batch.block_table_width)};
      shape_ = {padding->rows, padding->block_table_width, DeviceSampler::needs(batch)};
    }
    const DeviceBatch d = upload_.upload(batch, padding);
    sampler_.prepare(d);
    if (KernelTimer* timer = own_stream_.timer()) timer->begin_step(stream().handle, tokens);
    return d;
  }

  // The first step of a shape runs as it is: it allocates what is missing and lets libraries set themselves up, which a
  // recording does not allow. The second is recorded, and from then on the record is replayed.
  void run_step(const DeviceBatch&, const std::function<void()>& ops) override {
    const ProfilerRange range(num_prefills_ > 0 ? "prefill" : "decode");  // ncu.sh asks for it
    if (!shape_) return ops();
    if (moves_ != workspace_.moves()) graphs_.clear();  // they hold the old addresses
    moves_ = workspace_.moves();
    if (std::ssize(graphs_) > kMaxGraphs) graphs_.clear();  // each holds memory; those in use are soon recorded again
    std::optional<Graph>& graph = graphs_[*shape_];
    if (!seen_.contains(*shape_)) {
      ops();
      seen_.insert(*shape_);
      return;
    }
    if (!graph) graph.emplace(stream().handle, ops);
    graph->launch(stream().handle);
  }

  bool can_sample() const override { return true; }
  int32_t max_logprobs() const override { return kMaxLogprobs; }
  void sample(const Tensor& logits, const DeviceBatch& batch, int64_t begin) override {
    sampler_.sample(logits, batch, begin);
  }
  int64_t send(int64_t n) override { return sampler_.send(n); }
  Sampled receive(int64_t ticket) override {
    release_profiled();
    return sampler_.receive(ticket);
  }

  std::vector<KernelRecord> take_profile() override {
    KernelTimer* timer = own_stream_.timer();
    return timer ? timer->take() : std::vector<KernelRecord>();
  }

  void embedding(const Tensor& table, const int32_t* ids, const Tensor& out) override {
    const int64_t n = out.shape[0], dim = table.shape[1];
    check_shape("out", out, {n, dim});
    check_dtype("out", out, table.dtype);
    auto* own_ids = const_cast<int32_t*>(ids);  // what upload() made
    tiny_vllm::embedding(stream(), table.data, own_ids, sampler_.tokens(), out.data, n, dim * size_of(table.dtype));
  }

  void gather_rows(const Tensor& x, const int32_t* rows, const Tensor& out) override {
    const int64_t n = out.shape[0], dim = x.shape[1];
    check_shape("out", out, {n, dim});
    check_dtype("out", out, x.dtype);
    tiny_vllm::gather_rows(stream(), x.data, rows, out.data, n, dim * size_of(x.dtype));
  }

  void rms_norm(const Tensor& x, const Tensor& weight, float eps, const Tensor& out) override {
    const int64_t rows = x.shape[0], dim = x.shape[1];
    check_shape("x", x, {rows, dim});
    check_shape("out", out, {rows, dim});
    check_shape("weight", weight, {dim});
    check_dtype("out", out, x.dtype);
    check_dtype("weight", weight, x.dtype);
    for_dtype(x.dtype, [&]<typename T>(T) {
      tiny_vllm::rms_norm(stream(), x.as<T>(), weight.as<T>(), eps, out.as<T>(), rows, dim);
    });
  }

  // Of few rows our own kernel is the faster one, and does along with the product what stands beside it.
  void matmul(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out) override {
    check_product(x, weight, bias, out, weight.shape[0]);
    if (out.numel() == 0) return;
    if (!takes(gemv_takes, x, weight)) return gemm_.matmul(x, weight, bias, out, Gemm::kStore);
    gemv(stream(), gemv_args(x, weight, bias, out));
  }

  void matmul_add(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out) override {
    check_product(x, weight, bias, out, weight.shape[0]);
    check_dtype("out", out, x.dtype);
    if (out.numel() == 0) return;
    if (!takes(gemv_takes, x, weight)) return gemm_.matmul(x, weight, bias, out, Gemm::kAdd);
    GemvArgs args = gemv_args(x, weight, bias, out);
    args.epilogue = GemvArgs::kAdd;
    gemv(stream(), args);
  }

  void norm_matmul(const NormedRows& x, const Tensor& weight, const Tensor& bias, const Tensor& out) override {
    if (!takes(gemv_norm_takes, x.rows, weight)) return Backend::norm_matmul(x, weight, bias, out);
    check_product(x.rows, weight, bias, out, weight.shape[0]);
    gemv(stream(), norm_gemv_args(x, weight, bias, out));
  }

  void norm_matmul_act_mul(const NormedRows& x, const Tensor& weight, const Tensor& bias, Activation activation,
                           const Tensor& gate_up, const Tensor& out) override {
    if (!takes(gemv_takes, x.rows, weight))
      return Backend::norm_matmul_act_mul(x, weight, bias, activation, gate_up, out);
    check_product(x.rows, weight, bias, out, weight.shape[0] / 2);
    check_dtype("out", out, x.rows.dtype);
    GemvArgs args;
    if (takes(gemv_norm_takes, x.rows, weight)) {
      args = norm_gemv_args(x, weight, bias, out);
    } else {
      rms_norm(x.rows, x.weight, x.eps, x.room);
      args = gemv_args(x.room, weight, bias, out);
    }
    args.epilogue = GemvArgs::kActMul;
    args.activation = activation;
    gemv(stream(), args);
  }

  void rope_and_cache(const Tensor& qkv, const Tensor& q_norm, const Tensor& k_norm, float eps,
                      const DeviceBatch& batch, const AttentionShape& shape, const PagedKv& kv) override {
    check_attention(qkv, batch, shape, kv);
    if (q_norm.defined()) check_shape("q_norm", q_norm, {shape.head_dim});
    if (k_norm.defined()) check_shape("k_norm", k_norm, {shape.head_dim});
    for_dtype(qkv.dtype, [&]<typename T>(T) {
      RopeAndCacheArgs<T> args;
      args.qkv = qkv.as<T>();
      args.q_norm = q_norm.defined() ? q_norm.as<T>() : nullptr;
      args.k_norm = k_norm.defined() ? k_norm.as<T>() : nullptr;
      args.eps = eps;
      args.cos_sin = batch.cos_sin;
      args.slot_mapping = batch.slot_mapping;
      args.num_tokens = batch.num_tokens;
      args.shape = shape;
      args.keys = kv.keys.as<T>();
      args.values = kv.values.as<T>();
      tiny_vllm::rope_and_cache(stream(), args);
    });
  }

  void paged_attention(const Tensor& qkv, const DeviceBatch& batch, const AttentionShape& shape, const PagedKv& kv,
                       const Tensor& out) override {
    check_attention(qkv, batch, shape, kv);
    check_shape("out", out, {batch.num_tokens, shape.num_heads * shape.head_dim});
    check_dtype("out", out, qkv.dtype);
    if (batch.num_tokens == 0) return;
    for_dtype(qkv.dtype, [&]<typename T>(T) {
      AttentionArgs<T> args;
      args.qkv = qkv.as<T>();
      args.query_start = batch.query_start;
      args.context_len = batch.context_len;
      args.block_tables = batch.block_tables;
      args.block_table_width = batch.block_table_width;
      args.num_blocks = kv.keys.shape[0];
      args.num_tokens = batch.num_tokens;
      args.num_requests = batch.num_requests;
      args.max_context = batch.block_table_width * shape.block_size;
      args.shape = shape;
      args.keys = kv.keys.as<T>();
      args.values = kv.values.as<T>();
      args.out = out.as<T>();
      args.host = batch.host;
      if constexpr (std::is_same_v<T, bfloat16>) {
        if (shape.head_dim % 8 == 0 && shape.head_dim <= kMaxTensorCoreHeadDim) return attend_on_tensor_cores(args);
      }
      attention_plain(stream(), args);
    });
  }

  void act_mul(const Tensor& gate_up, Activation activation, const Tensor& out) override {
    const int64_t rows = out.shape[0], width = out.shape[1];
    check_shape("out", out, {rows, width});
    check_shape("gate_up", gate_up, {rows, 2 * width});
    check_dtype("out", out, gate_up.dtype);
    for_dtype(out.dtype, [&]<typename T>(T) {
      tiny_vllm::act_mul(stream(), gate_up.as<T>(), activation, out.as<T>(), rows, width);
    });
  }

  void copy_block(const PagedKv& kv, int32_t src, int32_t dst) override {
    if (src == dst) return;
    for (const Tensor* t : {&kv.keys, &kv.values}) {
      const Tensor from = t->rows(src, 1), to = t->rows(dst, 1);
      TV_CUDA(cudaMemcpyAsync(to.data, from.data, static_cast<size_t>(from.nbytes()), cudaMemcpyDeviceToDevice,
                              stream().handle));
    }
  }

 private:
  const Stream& stream() const { return own_stream_.stream(); }

  // Before every wait for the stream: a step that is profiled starts when all of it is there, or at such a wait.
  void release_profiled() {
    if (KernelTimer* timer = own_stream_.timer()) timer->release();
  }

  static void check_product(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out,
                            int64_t width) {
    const int64_t m = x.shape[0], k = x.shape[1], n = weight.shape[0];
    check_shape("x", x, {m, k});
    check_shape("weight", weight, {n, k});
    check_shape("out", out, {m, width});
    check_dtype("weight", weight, x.dtype);
    if (bias.defined()) {
      check_shape("bias", bias, {n});
      check_dtype("bias", bias, x.dtype);
    }
    if (out.dtype != DType::kFloat32) check_dtype("out", out, x.dtype);
  }

  template <typename Fn>
  static bool takes(Fn&& fn, const Tensor& x, const Tensor& weight) {
    return x.dtype == DType::kBFloat16 && fn(x.shape[0], weight.shape[0], x.shape[1]);
  }

  static GemvArgs gemv_args(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out) {
    GemvArgs args;
    args.x = x.as<bfloat16>();
    args.weight = weight.as<bfloat16>();
    args.bias = bias.defined() ? bias.as<bfloat16>() : nullptr;
    args.epilogue = out.dtype == DType::kFloat32 ? GemvArgs::kStoreFloat : GemvArgs::kStore;
    args.out = out.data;
    args.m = x.shape[0];
    args.n = weight.shape[0];
    args.k = x.shape[1];
    return args;
  }

  static GemvArgs norm_gemv_args(const NormedRows& x, const Tensor& weight, const Tensor& bias, const Tensor& out) {
    check_shape("norm weight", x.weight, {x.rows.shape[1]});
    check_dtype("norm weight", x.weight, x.rows.dtype);
    GemvArgs args = gemv_args(x.rows, weight, bias, out);
    args.norm_weight = x.weight.as<bfloat16>();
    args.eps = x.eps;
    return args;
  }

  static void check_attention(const Tensor& qkv, const DeviceBatch& batch, const AttentionShape& s, const PagedKv& kv) {
    TV_CHECK(s.num_kv_heads > 0 && s.num_heads % s.num_kv_heads == 0, s.num_heads, " query heads, ", s.num_kv_heads,
             " KV heads");
    TV_CHECK(s.head_dim > 0 && s.head_dim % 2 == 0 && s.head_dim <= kMaxHeadDim, "head_dim ", s.head_dim,
             " must be even and at most ", kMaxHeadDim);
    check_shape("qkv", qkv, {batch.num_tokens, (s.num_heads + 2 * s.num_kv_heads) * s.head_dim});
    for (const Tensor* t : {&kv.keys, &kv.values}) {
      check_shape("kv cache", *t, {kv.keys.shape[0], s.num_kv_heads, s.block_size, s.head_dim});
      check_dtype("kv cache", *t, qkv.dtype);
    }
  }

  void attend_on_tensor_cores(const AttentionArgs<bfloat16>& args) {
    if (num_prefills_ > 0) {
      if (attention_prefill_hopper_takes(stream(), args)) {
        attention_prefill_hopper(stream(), args);
      } else {
        attention_prefill(stream(), args);
      }
    }
    if (num_decodes_ == 0) return;
    const DecodeScratch need = attention_decode_scratch(stream(), args.num_requests, args.max_context, args.shape);
    workspace_.reserve(partials_, need.partial_floats * 4);
    workspace_.reserve(counters_, need.counters * 4, Workspace::Fill::kZero);
    attention_decode(stream(), args, partials_.as<float>(), counters_.as<unsigned>());
  }

  // Few shapes, so that few graphs are recorded: the padding costs less than a step of its own.
  static int64_t padded_size(int64_t tokens) {
    for (const int64_t size : {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512})
      if (tokens <= size) return size;
    return tokens;
  }
  static int64_t padded_width(int64_t width) {
    int64_t padded = 8;
    while (padded < width) padded *= 2;
    return padded;
  }

  static constexpr int64_t kMaxGraphTokens = 512;
  static constexpr int64_t kMaxGraphs = 256;

  OwnStream own_stream_;
  Gemm gemm_;
  Workspace workspace_{stream()};
  StepUpload upload_{stream(), workspace_};
  DeviceSampler sampler_{stream(), workspace_};
  Memory partials_{Memory::kDevice}, counters_{Memory::kDevice};  // of attention_decode
  int64_t num_prefills_ = 0, num_decodes_ = 0;                    // of the step

  struct Shape {  // of a step of decodes
    int64_t tokens = 0, block_table_width = 0;
    DeviceSampler::Needs sampling;
    auto operator<=>(const Shape&) const = default;
  };
  const bool use_graphs_;
  std::optional<Shape> shape_;  // of this step, when it can be replayed
  std::set<Shape> seen_;
  std::map<Shape, std::optional<Graph>> graphs_;
  int64_t moves_ = 0;  // of the workspace, when the graphs were recorded
};

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(const BackendOptions& options) {
  const CudaDevices found = cuda_devices();
  if (found.devices.empty()) throw DeviceError(str("device 'cuda' cannot be used: ", found.why_none));
  return std::make_unique<CudaBackend>(options);
}

}  // namespace tiny_vllm
