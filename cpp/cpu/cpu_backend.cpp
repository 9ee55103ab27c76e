// The ops of backend.h on the CPU: checks the shapes, cuts the work into parts, and lets the kernels do each part.
#include "cpu/cpu_backend.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "backend/checks.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "cpu/thread_pool.h"

namespace tiny_vllm {

namespace {

// A loop is only worth splitting when each thread gets this many numbers to work on: waking the others takes about a
// microsecond.
constexpr int64_t kGrain = 8192;

int64_t rows_per_part(int64_t numbers_per_row) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, numbers_per_row));
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Memory that an op needs while it runs, kept for the next one.
class Scratch {
 public:
  template <typename T>
  T* of(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    if (bytes > bytes_) {
      buffer_ = allocate_host(bytes);
      bytes_ = bytes;
    }
    return static_cast<T*>(buffer_.get());
  }

 private:
  Buffer buffer_;
  int64_t bytes_ = 0;
};

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(const BackendOptions& options)
      : kernels_(select_kernels(options.cpu_isa)), pool_(options.num_threads) {}

  std::string description() const override {
    return str("cpu, ", kernels_.name, ", ", pool_.num_threads(), pool_.num_threads() == 1 ? " thread" : " threads");
  }

  MemoryInfo memory() const override { return host_memory(); }
  Buffer allocate(int64_t bytes) override { return allocate_host(bytes); }
  void upload(void* device, const void* host, int64_t bytes) override { copy(device, host, bytes); }
  void download(void* host, const void* device, int64_t bytes) override { copy(host, device, bytes); }
  void synchronize() override {}

  // The batch stays where it is: the caller keeps it alive until the next one.
  DeviceBatch upload(const StepBatch& batch) override {
    const int64_t tokens = batch.num_tokens(), requests = batch.num_requests();
    check_batch(batch);
    return {.num_tokens = tokens,
            .num_requests = requests,
            .num_logits_rows = static_cast<int64_t>(batch.logits_rows.size()),
            .block_table_width = batch.block_table_width,
            .token_ids = batch.token_ids.data(),
            .positions = batch.positions.data(),
            .slot_mapping = batch.slot_mapping.data(),
            .query_start = batch.query_start.data(),
            .context_len = batch.context_len.data(),
            .block_tables = batch.block_tables.data(),
            .cos_sin = batch.cos_sin.data(),
            .logits_rows = batch.logits_rows.data(),
            .host = &batch};
  }

  void embedding(const Tensor& table, const int32_t* ids, const Tensor& out) override { gather_rows(table, ids, out); }

  void gather_rows(const Tensor& x, const int32_t* rows, const Tensor& out) override {
    const int64_t n = out.shape[0], dim = x.shape[1];
    check_shape("out", out, {n, dim});
    check_dtype("out", out, x.dtype);
    const int64_t row_bytes = dim * size_of(x.dtype);
    const char* from = static_cast<const char*>(x.data);
    char* to = static_cast<char*>(out.data);
    for (int64_t i = 0; i < n; ++i) {
      TV_CHECK(rows[i] >= 0 && rows[i] < x.shape[0], "row ", rows[i], " of a tensor ", x.shape_string());
    }
    pool_.parallel_for(n, rows_per_part(dim), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        std::memcpy(to + i * row_bytes, from + rows[i] * row_bytes, static_cast<size_t>(row_bytes));
      }
    });
  }

  void rms_norm(const Tensor& x, const Tensor& weight, float eps, const Tensor& out) override {
    const int64_t rows = x.shape[0], dim = x.shape[1];
    check_shape("x", x, {rows, dim});
    check_shape("out", out, {rows, dim});
    check_shape("weight", weight, {dim});
    check_dtype("out", out, x.dtype);
    check_dtype("weight", weight, x.dtype);
    for_dtype(x.dtype, [&]<typename T>(T) {
      pool_.parallel_for(rows, rows_per_part(dim), [&](int64_t begin, int64_t end) {
        kernels_.of<T>().rms_norm(x.as<T>() + begin * dim, weight.as<T>(), eps, out.as<T>() + begin * dim, end - begin,
                                  dim);
      });
    });
  }

  void matmul(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out) override {
    multiply(x, weight, bias, out, false);
  }
  void matmul_add(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out) override {
    check_dtype("out", out, x.dtype);
    multiply(x, weight, bias, out, true);
  }

  void rope_and_cache(const Tensor& qkv, const Tensor& q_norm, const Tensor& k_norm, float eps,
                      const DeviceBatch& batch, const AttentionShape& shape, const PagedKv& kv) override {
    check_attention(qkv, batch, shape, kv);
    const int64_t slots = kv.keys.shape[0] * shape.block_size;
    for (int64_t t = 0; t < batch.num_tokens; ++t) {
      TV_CHECK(batch.slot_mapping[t] >= 0 && batch.slot_mapping[t] < slots, "slot ", batch.slot_mapping[t], " of ",
               slots);
    }
    TV_CHECK(!batch.host || static_cast<int64_t>(batch.host->cos_sin.size()) == batch.num_tokens * shape.head_dim,
             "StepBatch.cos_sin has ", batch.host->cos_sin.size(), " entries, expected ", batch.num_tokens, " * ",
             shape.head_dim);
    if (q_norm.defined()) check_shape("q_norm", q_norm, {shape.head_dim});
    if (k_norm.defined()) check_shape("k_norm", k_norm, {shape.head_dim});

    for_dtype(qkv.dtype, [&]<typename T>(T) {
      const RopeArgs<T> args = {.qkv = qkv.as<T>(),
                                .q_norm = q_norm.defined() ? q_norm.as<T>() : nullptr,
                                .k_norm = k_norm.defined() ? k_norm.as<T>() : nullptr,
                                .eps = eps,
                                .cos_sin = batch.cos_sin,
                                .slot_mapping = batch.slot_mapping,
                                .shape = shape,
                                .keys = kv.keys.as<T>(),
                                .values = kv.values.as<T>()};
      pool_.parallel_for(batch.num_tokens, rows_per_part(qkv.shape[1]),
                         [&](int64_t begin, int64_t end) { kernels_.of<T>().rope_and_cache(args, begin, end); });
    });
  }

  void paged_attention(const Tensor& qkv, const DeviceBatch& batch, const AttentionShape& shape, const PagedKv& kv,
                       const Tensor& out) override {
    check_attention(qkv, batch, shape, kv);
    check_shape("out", out, {batch.num_tokens, shape.num_heads * shape.head_dim});
    check_dtype("out", out, qkv.dtype);
    check_block_tables(batch, shape, kv.keys.shape[0]);

    for_dtype(qkv.dtype, [&]<typename T>(T) {
      const AttentionArgs<T> args = {.qkv = qkv.as<T>(),
                                     .query_start = batch.query_start,
                                     .context_len = batch.context_len,
                                     .block_tables = batch.block_tables,
                                     .block_table_width = batch.block_table_width,
                                     .shape = shape,
                                     .keys = kv.keys.as<T>(),
                                     .values = kv.values.as<T>(),
                                     .out = out.as<T>()};
      attend(args, attention_items(batch, shape));
    });
  }

  void act_mul(const Tensor& gate_up, Activation activation, const Tensor& out) override {
    const int64_t rows = out.shape[0], width = out.shape[1];
    check_shape("out", out, {rows, width});
    check_shape("gate_up", gate_up, {rows, 2 * width});
    check_dtype("out", out, gate_up.dtype);
    for_dtype(out.dtype, [&]<typename T>(T) {
      const T* from = gate_up.as<T>();
      T* to = out.as<T>();
      pool_.parallel_for(rows, rows_per_part(width), [&](int64_t begin, int64_t end) {
        kernels_.of<T>().act_mul(from + begin * 2 * width, activation, to + begin * width, end - begin, width);
      });
    });
  }

  void copy_block(const PagedKv& kv, int32_t src, int32_t dst) override {
    for (const Tensor* t : {&kv.keys, &kv.values}) {
      const Tensor from = t->rows(src, 1), to = t->rows(dst, 1);
      if (src != dst) copy(to.data, from.data, from.nbytes());
    }
  }

 private:
  void multiply(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out, bool add) {
    const int64_t m = x.shape[0], k = x.shape[1], n = weight.shape[0];
    check_shape("x", x, {m, k});
    check_shape("weight", weight, {n, k});
    check_shape("out", out, {m, n});
    check_dtype("weight", weight, x.dtype);
    if (bias.defined()) {
      check_shape("bias", bias, {n});
      check_dtype("bias", bias, x.dtype);
    }
    const bool out_is_float = out.dtype == DType::kFloat32 && x.dtype != DType::kFloat32;
    if (!out_is_float) check_dtype("out", out, x.dtype);
    if (m == 0 || n == 0) return;

    for_dtype(x.dtype, [&]<typename T>(T) {
      const Kernels<T>& kernels = kernels_.of<T>();
      MatmulArgs<T> args = {.x = x.as<T>(),
                            .weight = weight.as<T>(),
                            .bias = bias.defined() ? bias.as<T>() : nullptr,
                            .out = out.data,
                            .out_is_float = out_is_float,
                            .add = add,
                            .m = m,
                            .n = n,
                            .k = k};
      if (kernels.pack_x) {
        thread_local Scratch packed;
        T* to = packed.of<T>(kernels.packed_size(m, k));  // the threads see the caller's, not their own
        pool_.parallel_for(ceil_div(m, 16), rows_per_part(16 * k),
                           [&](int64_t begin, int64_t end) { kernels.pack_x(args, to, begin, end); });
        args.packed_x = to;
      }
      // Threads share the columns, a panel at a time: each reads its own part of the weights, from end to end.
      const int64_t panel = kernels.columns_per_panel;
      pool_.parallel_for(
          ceil_div(n, panel), ceil_div(4 * kGrain, panel * std::max<int64_t>(1, m * k)),
          [&](int64_t begin, int64_t end) { kernels.matmul(args, begin * panel, std::min(n, end * panel)); });
    });
  }

  static void copy(void* to, const void* from, int64_t bytes) {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }

  static void check_attention(const Tensor& qkv, const DeviceBatch& batch, const AttentionShape& s, const PagedKv& kv) {
    TV_CHECK(s.num_heads > 0 && s.num_kv_heads > 0 && s.num_heads % s.num_kv_heads == 0, s.num_heads, " query heads, ",
             s.num_kv_heads, " KV heads");
    TV_CHECK(s.block_size > 0, "block_size ", s.block_size, " must be 1 or more");
    TV_CHECK(s.head_dim > 0 && s.head_dim % 2 == 0 && s.head_dim <= kMaxHeadDim, "head_dim ", s.head_dim,
             " must be even and at most ", kMaxHeadDim);
    check_shape("qkv", qkv, {batch.num_tokens, (s.num_heads + 2 * s.num_kv_heads) * s.head_dim});
    const int64_t blocks = kv.keys.shape[0];
    for (const Tensor* t : {&kv.keys, &kv.values}) {
      check_shape("kv cache", *t, {blocks, s.num_kv_heads, s.block_size, s.head_dim});
      check_dtype("kv cache", *t, qkv.dtype);
    }
  }

  static void check_block_tables(const DeviceBatch& batch, const AttentionShape& shape, int64_t num_blocks) {
    for (int64_t r = 0; r < batch.num_requests; ++r) {
      const int64_t context = batch.context_len[r], blocks = ceil_div(context, shape.block_size);
      TV_CHECK(context >= 0, "a context of ", context, " tokens");
      TV_CHECK(blocks <= batch.block_table_width, "a context of ", context, " tokens needs ", blocks,
               " blocks, the block table has ", batch.block_table_width);
      // A sliding window leaves the blocks before it behind.
      const int64_t tokens = batch.query_start[r + 1] - batch.query_start[r];
      const int64_t oldest =
          shape.sliding_window > 0 ? std::max<int64_t>(0, context - tokens - shape.sliding_window + 1) : 0;
      for (int64_t b = oldest / shape.block_size; b < blocks; ++b) {
        const int32_t block = batch.block_tables[r * batch.block_table_width + b];
        TV_CHECK(block >= 0 && block < num_blocks, "block ", block, " of ", num_blocks);
      }
    }
  }

  // The work of paged_attention, cut by request, KV head and rows; the longest contexts come first, so that no thread
  // is left alone with a long one at the end.
  static std::vector<AttentionItem> attention_items(const DeviceBatch& batch, const AttentionShape& shape) {
    std::vector<AttentionItem> items;
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    for (int64_t r = 0; r < batch.num_requests; ++r) {
      const int64_t tokens = batch.query_start[r + 1] - batch.query_start[r], rows = tokens * group;
      for (int64_t begin = 0; begin < rows; begin += kQueryRows) {
        const int64_t end = std::min(begin + kQueryRows, rows);
        const int64_t last_position = batch.context_len[r] - tokens + (end - 1) / group;
        const int64_t first_position = batch.context_len[r] - tokens + begin / group;
        const int64_t oldest = shape.sliding_window > 0 ? first_position - shape.sliding_window + 1 : 0;
        for (int64_t h = 0; h < shape.num_kv_heads; ++h) {
          items.push_back({.request = r,
                           .kv_head = h,
                           .row_begin = begin,
                           .row_end = end,
                           .split_begin = std::max<int64_t>(0, oldest) / kKeySplit,
                           .split_end = ceil_div(std::max<int64_t>(0, last_position + 1), kKeySplit)});
        }
      }
    }
    std::stable_sort(items.begin(), items.end(), [](const AttentionItem& a, const AttentionItem& b) {
      return a.split_end - a.split_begin > b.split_end - b.split_begin;
    });
    return items;
  }

  template <typename T>
  void attend(const AttentionArgs<T>& args, const std::vector<AttentionItem>& items) {
    const Kernels<T>& kernels = kernels_.of<T>();
    const int64_t dim = args.shape.head_dim;
    const auto scratch = [&] {
      thread_local Scratch floats;
      return floats.of<float>(attention_scratch_floats(dim));
    };

    // With few items and long contexts, each part of the context becomes an item of its own. The bits are the same.
    const int64_t count = static_cast<int64_t>(items.size());
    int64_t splits = 0;
    for (const AttentionItem& item : items) splits += item.split_end - item.split_begin;
    if (!kernels.attention_merge || pool_.num_threads() == 1 || count >= 4 * pool_.num_threads() || splits <= count) {
      pool_.parallel_items(count, [&](int64_t i) { kernels.attention(args, items[i], scratch()); });
      return;
    }

    std::vector<AttentionItem> parts;
    std::vector<int64_t> first_float(items.size());
    int64_t floats = 0;
    for (int64_t i = 0; i < count; ++i) {
      first_float[i] = floats;
      for (int64_t s = items[i].split_begin; s < items[i].split_end; ++s) {
        AttentionItem part = items[i];
        part.split_begin = s;
        part.split_end = s + 1;
        parts.push_back(part);
        floats += (part.row_end - part.row_begin) * partial_floats(dim);
      }
    }
    std::vector<float> partials(static_cast<size_t>(floats));
    int64_t at = 0;
    for (AttentionItem& part : parts) {
      part.partial = partials.data() + at;
      at += (part.row_end - part.row_begin) * partial_floats(dim);
    }
    pool_.parallel_items(static_cast<int64_t>(parts.size()),
                         [&](int64_t i) { kernels.attention(args, parts[i], scratch()); });
    pool_.parallel_items(count, [&](int64_t i) {
      kernels.attention_merge(args, items[i], partials.data() + first_float[i],
                              items[i].split_end - items[i].split_begin, scratch());
    });
  }

  const CpuKernels& kernels_;
  ThreadPool pool_;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options) {
  return std::make_unique<CpuBackend>(options);
}

double measure_read_bandwidth(int num_threads, int64_t bytes) {
  constexpr int64_t kPiece = int64_t{1} << 20;
  bytes = std::max(kPiece, bytes / kPiece * kPiece);
  const auto read_all = select_kernels("auto").read_all;
  ThreadPool pool(num_threads);
  const Buffer buffer = allocate_host(bytes);
  char* data = static_cast<char*>(buffer.get());
  std::memset(data, 1, static_cast<size_t>(bytes));

  std::atomic<uint64_t> sum{0};  // used, so that the reads are not optimised away
  double best = 0;
  for (int round = 0; round < 5; ++round) {
    const auto start = std::chrono::steady_clock::now();
    pool.parallel_for(bytes / kPiece, 1, [&](int64_t begin, int64_t end) {
      sum ^= read_all(data + begin * kPiece, (end - begin) * kPiece);
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(bytes) / seconds.count() / 1e9);
  }
  return best;
}

}  // namespace tiny_vllm
