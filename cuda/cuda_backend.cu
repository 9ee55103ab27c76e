// The ops of backend.h on an NVIDIA GPU: one stream, checked shapes, and for each op the kernel that suits it.
#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda_devices.h"
#include "base/build_info.h"
#include "cuda_check.h"
#include "gemm.h"
#include "graph.h"
#include "kernels/kernels.h"

namespace tiny_vllm {
namespace {

constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kMaxTensorCoreHeadDim = 256;

void check_shape(const char* name, const Tensor& t, std::initializer_list<int64_t> expected) {
  TV_CHECK(t.defined() || t.numel() == 0, name, " has no data");
  TV_CHECK(t.ndim == static_cast<int>(expected.size()) && std::equal(expected.begin(), expected.end(), t.shape.begin()),
           name, " has shape ", t.shape_string(), ", expected ", Tensor(nullptr, t.dtype, expected).shape_string());
}

void check_dtype(const char* name, const Tensor& t, DType dtype) {
  TV_CHECK(t.dtype == dtype, name, " is ", name_of(t.dtype), ", expected ", name_of(dtype));
}

template <typename Fn>
void for_dtype(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kBFloat16:
      return fn(bfloat16{});
    case DType::kFloat32:
      return fn(float{});
    case DType::kFloat16:
      break;
  }
  TV_CHECK(false, "the CUDA backend computes in bfloat16 or float32, not in ", name_of(dtype));
}

__global__ void probe_kernel() {}

// Memory of the device, or pinned memory of the host. Freed with the object.
class Memory {
 public:
  enum Kind { kDevice, kPinned };
  Memory() = default;
  Memory(Kind kind, size_t bytes) : kind_(kind), bytes_(bytes) {
    if (kind == kDevice) {
      TV_CUDA(cudaMalloc(&data_, bytes));
    } else {
      TV_CUDA(cudaMallocHost(&data_, bytes));
    }
  }
  ~Memory() { kind_ == kDevice ? cudaFree(data_) : cudaFreeHost(data_); }
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }
  char* data() const { return static_cast<char*>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  void swap(Memory& other) {
    std::swap(kind_, other.kind_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  Kind kind_ = kDevice;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// The stream that everything runs on, in order.
class OwnStream {
 public:
  OwnStream() {
    int device = 0;
    TV_CUDA(cudaGetDevice(&device));
    TV_CUDA(cudaGetDeviceProperties(&properties_, device));
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, probe_kernel);
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
      cudaGetLastError();
      std::string list;
      for (const std::string& arch : build_info().cuda_architectures) list += (list.empty() ? "" : ", ") + arch;
      throw DeviceError(str("this build has code for compute capabilities ", list, ", and ", properties_.name, " has ",
                            properties_.major, properties_.minor, ": build again with CUDAARCHS=", properties_.major,
                            properties_.minor));
    }
    check_cuda(error, "cudaFuncGetAttributes(&attributes, probe_kernel)");
    stream_.num_sms = properties_.multiProcessorCount;
    stream_.dependent_launch = properties_.major >= 9;
    const auto& built = build_info().cuda_architectures;
    stream_.has_wgmma =
        properties_.major == 9 && properties_.minor == 0 && std::find(built.begin(), built.end(), "90a") != built.end();
    TV_CUDA(cudaStreamCreateWithFlags(&stream_.handle, cudaStreamNonBlocking));
  }
  ~OwnStream() { cudaStreamDestroy(stream_.handle); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  const Stream& stream() const { return stream_; }
  const cudaDeviceProp& properties() const { return properties_; }

 private:
  Stream stream_;
  cudaDeviceProp properties_{};
};

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(const BackendOptions& options) : gemm_(stream()), use_graphs_(!options.enforce_eager) {}

  std::string description() const override {
    const cudaDeviceProp& p = own_stream_.properties();
    return str("cuda, ", p.name, ", compute capability ", p.major, ".", p.minor);
  }

  MemoryInfo memory() const override {
    size_t free = 0, total = 0;
    TV_CUDA(cudaMemGetInfo(&free, &total));
    return {static_cast<int64_t>(total), static_cast<int64_t>(free)};
  }

  BackendDefaults defaults() const override {
    return {.memory_utilization = 0.9, .max_num_seqs = 256, .max_num_batched_tokens = 8192};
  }

  int64_t max_padding() const override { return kMaxPadding; }

  Buffer allocate(int64_t bytes) override {
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
    return Buffer(data, [](void* p) { cudaFree(p); });
  }

  void upload(void* device, const void* host, int64_t bytes) override {
    if (bytes == 0) return;
    TV_CUDA(cudaMemcpyAsync(device, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream().handle));
    synchronize();  // the caller may give the host's memory back
  }
  void download(void* host, const void* device, int64_t bytes) override {
    if (bytes == 0) return;
    TV_CUDA(cudaMemcpyAsync(host, device, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream().handle));
    synchronize();
  }
  void fill_zero(void* device, int64_t bytes) override {
    if (bytes > 0) TV_CUDA(cudaMemsetAsync(device, 0, static_cast<size_t>(bytes), stream().handle));
  }
  void synchronize() override { TV_CUDA(cudaStreamSynchronize(stream().handle)); }

  // One copy from pinned memory brings all arrays of the step, each at a multiple of 16 bytes.
  //
  // A step of decodes alone is padded to one of a few shapes, so that its calls can be recorded and replayed.
  DeviceBatch upload(const StepBatch& batch) override {
    const int64_t tokens = batch.num_tokens(), requests = batch.num_requests();
    const auto check_size = [](const char* name, size_t size, int64_t expected) {
      TV_CHECK(static_cast<int64_t>(size) == expected, "StepBatch.", name, " has ", size, " entries, expected ",
               expected);
    };
    check_size("positions", batch.positions.size(), tokens);
    check_size("slot_mapping", batch.slot_mapping.size(), tokens);
    check_size("query_start", batch.query_start.size(), requests + 1);
    check_size("block_tables", batch.block_tables.size(), requests * batch.block_table_width);
    TV_CHECK(batch.query_start.front() == 0 && batch.query_start.back() == tokens &&
                 std::is_sorted(batch.query_start.begin(), batch.query_start.end()),
             "StepBatch.query_start must rise from 0 to ", tokens);

    num_decodes_ = 0;
    for (int64_t r = 0; r < requests; ++r) num_decodes_ += batch.query_start[r + 1] - batch.query_start[r] == 1;
    num_prefills_ = requests - num_decodes_;
    const bool fixed_shape = use_graphs_ && num_prefills_ == 0 && tokens <= kMaxGraphTokens &&
                             std::ssize(batch.logits_rows) == tokens && !batch.cos_sin.empty();
    shape_.reset();
    DeviceBatch d;
    d.num_tokens = fixed_shape ? padded_size(tokens) : tokens;
    d.num_requests = fixed_shape ? d.num_tokens : requests;
    d.num_logits_rows = fixed_shape ? d.num_tokens : std::ssize(batch.logits_rows);
    d.block_table_width = fixed_shape ? padded_width(batch.block_table_width) : batch.block_table_width;
    d.host = &batch;
    if (fixed_shape) shape_ = {d.num_tokens, d.block_table_width};
    const int64_t padding = d.num_tokens - tokens;

    // First where everything goes, then the copies.
    int64_t bytes = 0;
    const auto place = [&](int64_t count, auto element) {
      const int64_t at = bytes;
      bytes += (count * static_cast<int64_t>(sizeof(element)) + 15) / 16 * 16;
      return at;
    };
    const int64_t cos_sin_row = tokens == 0 ? 0 : std::ssize(batch.cos_sin) / tokens;
    const int64_t token_ids = place(d.num_tokens, int32_t{}), positions = place(d.num_tokens, int32_t{});
    const int64_t slot_mapping = place(d.num_tokens, int64_t{}), query_start = place(d.num_requests + 1, int32_t{});
    const int64_t context_len = place(d.num_requests, int32_t{});
    const int64_t logits_rows = place(d.num_logits_rows, int32_t{});
    const int64_t cos_sin = place(d.num_tokens * cos_sin_row, float{});
    const int64_t block_tables = place(d.num_requests * d.block_table_width, int32_t{});
    synchronize();  // the last step's copy may still read the staging memory
    if (bytes > static_cast<int64_t>(staging_.bytes())) {
      graphs_.clear();  // they hold the old addresses
      staging_ = Memory();
      staging_ = Memory(Memory::kPinned, static_cast<size_t>(2 * bytes));
      step_ = Memory();
      step_ = Memory(Memory::kDevice, static_cast<size_t>(2 * bytes));
    }
    const auto fill = [&](int64_t at, const auto& v, auto first, auto increment) {
      auto* to = reinterpret_cast<std::decay_t<decltype(v[0])>*>(staging_.data() + at);
      std::copy(v.begin(), v.end(), to);
      for (int64_t i = 0; i < padding; ++i) to[std::ssize(v) + i] = first + increment * i;
    };
    fill(token_ids, batch.token_ids, 0, 0);
    fill(positions, batch.positions, 0, 0);
    fill(slot_mapping, batch.slot_mapping, int64_t{-1}, 0);
    fill(query_start, batch.query_start, static_cast<int32_t>(tokens) + 1, 1);
    fill(context_len, batch.context_len, 0, 0);
    fill(logits_rows, batch.logits_rows, static_cast<int32_t>(tokens), 1);
    std::copy(batch.cos_sin.begin(), batch.cos_sin.end(), reinterpret_cast<float*>(staging_.data() + cos_sin));
    auto* table = reinterpret_cast<int32_t*>(staging_.data() + block_tables);
    for (int64_t r = 0; r < requests; ++r)
      std::copy_n(batch.block_tables.begin() + r * batch.block_table_width, batch.block_table_width,
                  table + r * d.block_table_width);
    TV_CUDA(cudaMemcpyAsync(step_.data(), staging_.data(), static_cast<size_t>(bytes), cudaMemcpyHostToDevice,
                            stream().handle));

    d.token_ids = reinterpret_cast<int32_t*>(step_.data() + token_ids);
    d.positions = reinterpret_cast<int32_t*>(step_.data() + positions);
    d.slot_mapping = reinterpret_cast<int64_t*>(step_.data() + slot_mapping);
    d.query_start = reinterpret_cast<int32_t*>(step_.data() + query_start);
    d.context_len = reinterpret_cast<int32_t*>(step_.data() + context_len);
    d.block_tables = reinterpret_cast<int32_t*>(step_.data() + block_tables);
    d.cos_sin = reinterpret_cast<float*>(step_.data() + cos_sin);
    d.logits_rows = reinterpret_cast<int32_t*>(step_.data() + logits_rows);
    return d;
  }

  // The first step of a shape runs as it is: it allocates what is missing and lets libraries set themselves up, which a
  // recording does not allow. The second is recorded, and from then on the record is replayed.
  void run_step(const DeviceBatch&, const std::function<void()>& ops) override {
    if (!shape_) return ops();
    std::optional<Graph>& graph = graphs_[*shape_];
    if (!seen_.contains(*shape_)) {
      ops();
      seen_.insert(*shape_);
      return;
    }
    if (!graph) graph.emplace(stream().handle, ops);
    graph->launch(stream().handle);
  }

  bool sample(const Tensor& logits, std::span<const SampleRow> rows, int32_t* tokens) override {
    const int64_t n = logits.shape[0], vocab_size = logits.shape[1];
    TV_CHECK(logits.dtype == DType::kFloat32 && n == std::ssize(rows), "logits are ", name_of(logits.dtype), " ",
             logits.shape_string(), " for ", rows.size(), " rows");
    if (n == 0) return true;
    const auto bytes = static_cast<int64_t>(rows.size_bytes());
    if (bytes > static_cast<int64_t>(sampling_staging_.bytes())) {
      sampling_staging_ = Memory();
      sampling_staging_ = Memory(Memory::kPinned, static_cast<size_t>(bytes));
    }
    reserve(sampling_rows_, bytes, false);
    reserve(sampling_cuts_, n * 8, false);
    reserve(sampling_partials_, sampling_partial_bytes(stream(), n), false);
    reserve(sampling_counters_, n * 4, true);
    reserve(sampled_, n * 4, false);
    std::memcpy(sampling_staging_.data(), rows.data(), rows.size_bytes());
    TV_CUDA(cudaMemcpyAsync(sampling_rows_.data(), sampling_staging_.data(), rows.size_bytes(), cudaMemcpyHostToDevice,
                            stream().handle));
    SamplingArgs args;
    args.logits = logits.as<float>();
    args.rows = reinterpret_cast<const SampleRow*>(sampling_rows_.data());
    args.n = n;
    args.vocab_size = vocab_size;
    if (std::ranges::any_of(rows, [&](const SampleRow& row) { return has_filter(row, vocab_size); }))
      args.cuts = reinterpret_cast<uint64_t*>(sampling_cuts_.data());
    args.partials = sampling_partials_.data();
    args.counters = reinterpret_cast<unsigned*>(sampling_counters_.data());
    args.tokens = reinterpret_cast<int32_t*>(sampled_.data());
    sample_rows(stream(), args);
    download(tokens, sampled_.data(), n * 4);  // waits, so that the staging memory is free for the next call
    return true;
  }

  void embedding(const Tensor& table, const int32_t* ids, const Tensor& out) override { gather_rows(table, ids, out); }

  void gather_rows(const Tensor& x, const int32_t* rows, const Tensor& out) override {
    const int64_t n = out.shape[0], dim = x.shape[1];
    check_shape("out", out, {n, dim});
    check_dtype("out", out, x.dtype);
    tiny_vllm::gather_rows(stream(), x.data, rows, out.data, n, dim * size_of(x.dtype));
  }

  void rms_norm(const Tensor& x, const Tensor& weight, float eps, const Tensor& out) override {
    norm_rows(nullptr, x, weight, eps, out);
  }

  void add_rms_norm(const Tensor& residual, const Tensor& x, const Tensor& weight, float eps,
                    const Tensor& out) override {
    norm_rows(&residual, x, weight, eps, out);
  }

  void matmul(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out) override {
    const int64_t m = x.shape[0], k = x.shape[1], n = weight.shape[0];
    check_shape("x", x, {m, k});
    check_shape("weight", weight, {n, k});
    check_shape("out", out, {m, n});
    check_dtype("weight", weight, x.dtype);
    if (bias.defined()) {
      check_shape("bias", bias, {n});
      check_dtype("bias", bias, x.dtype);
    }
    if (out.dtype != DType::kFloat32) check_dtype("out", out, x.dtype);
    if (m == 0 || n == 0) return;
    if (x.dtype == DType::kBFloat16 && gemv_takes(m, n, k)) {
      gemv(stream(), x.as<bfloat16>(), weight.as<bfloat16>(), bias.defined() ? bias.as<bfloat16>() : nullptr, out.data,
           out.dtype == DType::kFloat32, m, n, k);
    } else {
      gemm_.matmul(x, weight, bias, out);
    }
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

  void norm_rows(const Tensor* residual, const Tensor& x, const Tensor& weight, float eps, const Tensor& out) {
    const int64_t rows = x.shape[0], dim = x.shape[1];
    check_shape("x", x, {rows, dim});
    check_shape("out", out, {rows, dim});
    check_shape("weight", weight, {dim});
    check_dtype("out", out, x.dtype);
    check_dtype("weight", weight, x.dtype);
    if (residual) {
      check_shape("residual", *residual, {rows, dim});
      check_dtype("residual", *residual, x.dtype);
    }
    for_dtype(x.dtype, [&]<typename T>(T) {
      tiny_vllm::rms_norm(stream(), residual ? residual->as<T>() : nullptr, x.as<T>(), weight.as<T>(), eps, out.as<T>(),
                          rows, dim);
    });
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
    reserve(partials_, need.partial_floats * 4, false);
    reserve(counters_, need.counters * 4, true);
    attention_decode(stream(), args, reinterpret_cast<float*>(partials_.data()),
                     reinterpret_cast<unsigned*>(counters_.data()));
  }

  // Makes room; with `zero`, of zeros. What was there is lost.
  void reserve(Memory& memory, int64_t bytes, bool zero) {
    if (bytes <= static_cast<int64_t>(memory.bytes())) return;
    synchronize();    // kernels under way still use the old memory,
    graphs_.clear();  // and graphs hold its address
    memory = Memory();
    memory = Memory(Memory::kDevice, static_cast<size_t>(bytes));
    if (zero) fill_zero(memory.data(), bytes);
  }

  // Few shapes, so that few graphs are recorded: the padding costs less than a step of its own.
  static int64_t padded_size(int64_t tokens) {
    for (const int64_t size : {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512})
      if (tokens <= size) return size;
    return tokens;
  }
  static constexpr int64_t kMaxPadding = 63;  // 257 to 320
  static int64_t padded_width(int64_t width) {
    int64_t padded = 8;
    while (padded < width) padded *= 2;
    return padded;
  }

  static constexpr int64_t kMaxGraphTokens = 512;

  OwnStream own_stream_;
  Gemm gemm_;
  Memory staging_, step_;       // the step's arrays, here and there
  Memory partials_, counters_;  // of attention_decode
  Memory sampling_staging_;     // parameters of rows, on their way
  Memory sampling_rows_, sampling_cuts_, sampling_partials_, sampling_counters_, sampled_;
  int64_t num_prefills_ = 0, num_decodes_ = 0;  // of the step

  using Shape = std::array<int64_t, 2>;  // tokens and block table width of a step of decodes
  const bool use_graphs_;
  std::optional<Shape> shape_;  // of this step, when it can be replayed
  std::set<Shape> seen_;
  std::map<Shape, std::optional<Graph>> graphs_;
};

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(const BackendOptions& options) {
  const CudaDevices found = cuda_devices();
  if (found.devices.empty()) throw DeviceError(str("device 'cuda' cannot be used: ", found.why_none));
  return std::make_unique<CudaBackend>(options);
}

}  // namespace tiny_vllm
