// Sizes whose offsets do not fit 32 bits, and grids beyond 65,535: each kernel at the far end of more than 2^31
// elements. Needs about 20 GB of GPU memory. Run by full_test.sh --gpu.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "check.h"
#include "device_array.h"
#include "gemm.h"
#include "kernels/device.h"
#include "kernels/kernels.h"

namespace tiny_vllm {
namespace {

// Numbers in [-1, 1), the same for the same seed.
std::vector<bfloat16> numbers(int64_t n, uint32_t seed) {
  std::vector<bfloat16> v(static_cast<size_t>(n));
  for (bfloat16& x : v) {
    seed = seed * 1664525u + 1013904223u;
    x = to_bfloat16(static_cast<float>(seed >> 8) * 0x1p-23f - 1);
  }
  return v;
}

bool same(const std::vector<bfloat16>& a, const std::vector<bfloat16>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](bfloat16 x, bfloat16 y) { return x.bits == y.bits; });
}

TEST(gather_rows_at_the_end_of_a_large_table) {
  const int64_t rows = 1'500'000, dim = 2048;  // 3.07e9 elements
  Array<bfloat16> table(rows * dim), out(2 * dim);
  const auto last = numbers(dim, 1), first = numbers(dim, 2);
  table.set((rows - 1) * dim, last);
  table.set(0, first);
  Array<int32_t> ids({static_cast<int32_t>(rows - 1), 0});
  gather_rows(stream(), table.data(), ids.data(), out.data(), 2, dim * 2);
  CHECK(same(out.get(0, dim), last));
  CHECK(same(out.get(dim, dim), first));
}

TEST(norms_and_gates_of_many_rows) {
  const int64_t rows = 1'100'000, dim = 2048;  // 2.25e9 elements
  Array<bfloat16> x(rows * dim), out(rows * dim), alone(dim), weight(numbers(dim, 3));
  const auto row = numbers(dim, 1);
  x.set((rows - 1) * dim, row);
  rms_norm(stream(), x.data(), weight.data(), 1e-5f, out.data(), rows, dim);
  Array<bfloat16> small(row);
  rms_norm(stream(), small.data(), weight.data(), 1e-5f, alone.data(), 1, dim);
  CHECK(same(out.get((rows - 1) * dim, dim), alone.get(0, dim)));

  act_mul(stream(), x.data(), Activation::kSilu, out.data(), rows, dim / 2);
  act_mul(stream(), small.data(), Activation::kSilu, alone.data(), 1, dim / 2);
  CHECK(same(out.get((rows - 1) * dim / 2, dim / 2), alone.get(0, dim / 2)));
}

TEST(products_with_a_large_weight) {
  const int64_t n = 1'100'000, k = 2048;  // 2.25e9 elements
  Array<bfloat16> weight(n * k);
  const auto last = numbers(k, 1);
  weight.set((n - 1) * k, last);
  Gemm gemm(stream());
  for (const int64_t m : {1, 8, 33}) {
    const auto x = numbers(m * k, 2);
    Array<bfloat16> input(x);
    Array<float> out(m * n);
    if (gemv_takes(m, n, k)) {
      GemvArgs args;
      args.x = input.data();
      args.weight = weight.data();
      args.epilogue = GemvArgs::kStoreFloat;
      args.out = out.data();
      args.m = m;
      args.n = n;
      args.k = k;
      gemv(stream(), args);
    } else {
      gemm.matmul(Tensor(input.data(), DType::kBFloat16, {m, k}), Tensor(weight.data(), DType::kBFloat16, {n, k}),
                  Tensor(), Tensor(out.data(), DType::kFloat32, {m, n}), Gemm::kStore);
    }
    for (const int64_t row : {int64_t{0}, m - 1}) {
      double expected = 0;
      for (int64_t i = 0; i < k; ++i) expected += double{to_float(x[row * k + i])} * to_float(last[i]);
      CHECK(std::abs(out.get(row * n + n - 1, 1)[0] - expected) < 1e-3);
    }
  }
}

TEST(the_largest_of_many_large_rows) {
  const int64_t rows = 17'000, vocab_size = 128'256;  // 2.18e9 elements
  Array<float> logits(rows * vocab_size);
  Array<int32_t> tokens(rows);
  Array<unsigned char> partials(sampling_partial_bytes(stream(), rows));
  Array<unsigned> counters(std::vector<unsigned>(rows, 0));
  const Array<SampleRow> greedy(std::vector<SampleRow>(rows, SampleRow{.temperature = 0}));
  logits.set((rows - 1) * vocab_size + 77'777, {3.4e38f});
  SamplingArgs args;
  args.logits = logits.data();
  args.rows = greedy.data();
  args.n = rows;
  args.vocab_size = vocab_size;
  args.partials = partials.data();
  args.counters = counters.data();
  args.tokens = tokens.data();
  sample_rows(stream(), args);
  CHECK_EQ(tokens.get(rows - 1, 1)[0], 77'777);
  CHECK_EQ(tokens.get(rows - 2, 1)[0], 0);  // all equal: the lowest id
  CHECK(counters.get(0, rows) == std::vector<unsigned>(rows, 0));
}

// Keys and values in the last blocks of a cache of 2.46e9 elements, and the same in a small one: the same bits.
TEST(attention_in_a_large_cache) {
  const AttentionShape shape{8, 8, 64, 16, 0, 0.125f};
  const int64_t many = 300'000, few = 8, block = shape.num_kv_heads * shape.block_size * shape.head_dim;
  const int64_t width = shape.head_dim * (shape.num_heads + 2 * shape.num_kv_heads);
  std::vector<bfloat16> results[2][3];
  for (const int64_t blocks : {many, few}) {
    Array<bfloat16> keys(blocks * block), values(blocks * block);
    // 40 tokens are written by rope_and_cache, into the last blocks; then they are read as a prefill, and by a decode.
    const int64_t tokens = 40;
    Array<bfloat16> qkv(numbers(tokens * width, 5)), out(tokens * shape.num_heads * shape.head_dim);
    Array<float> cos_sin(std::vector<float>(tokens * shape.head_dim, 0.6f));
    std::vector<int64_t> slots;
    for (int64_t t = 0; t < tokens; ++t) slots.push_back((blocks - 3) * shape.block_size + t);
    const Array<int64_t> slot_mapping(slots);
    RopeAndCacheArgs<bfloat16> rope;
    rope.qkv = qkv.data();
    rope.cos_sin = cos_sin.data();
    rope.slot_mapping = slot_mapping.data();
    rope.num_tokens = tokens;
    rope.shape = shape;
    rope.keys = keys.data();
    rope.values = values.data();
    rope_and_cache(stream(), rope);

    const auto last = static_cast<int32_t>(blocks);
    const Array<int32_t> start(std::vector<int32_t>{0, tokens}), one(std::vector<int32_t>{0, 1});
    const Array<int32_t> context(std::vector<int32_t>{tokens}), table({last - 3, last - 2, last - 1});
    AttentionArgs<bfloat16> args;
    args.qkv = qkv.data();
    args.query_start = start.data();
    args.context_len = context.data();
    args.block_tables = table.data();
    args.block_table_width = 3;
    args.num_blocks = blocks;
    args.num_tokens = tokens;
    args.num_requests = 1;
    args.max_context = 48;
    args.shape = shape;
    args.keys = keys.data();
    args.values = values.data();
    args.out = out.data();
    const int64_t row = shape.num_heads * shape.head_dim;
    auto& result = results[blocks == many];
    attention_prefill(stream(), args);
    result[0] = out.get(0, tokens * row);
    attention_plain(stream(), args);
    result[1] = out.get(0, tokens * row);
    const DecodeScratch need = attention_decode_scratch(stream(), 1, 48, shape);
    Array<float> partials(need.partial_floats);
    Array<unsigned> counters(std::vector<unsigned>(need.counters, 0));
    args.query_start = one.data();
    args.num_tokens = 1;
    attention_decode(stream(), args, partials.data(), counters.data());
    result[2] = out.get(0, row);
    if (attention_prefill_hopper_takes(stream(), args)) {
      args.query_start = start.data();
      args.num_tokens = tokens;
      attention_prefill_hopper(stream(), args);
      const auto hopper = out.get(0, tokens * row);
      double worst = 0;
      for (size_t i = 0; i < hopper.size(); ++i)
        worst = std::max(worst, std::abs(double{to_float(hopper[i])} - to_float(result[0][i])));
      CHECK(worst < 0.02);
    }
  }
  for (int i = 0; i < 3; ++i) CHECK(same(results[0][i], results[1][i]));
  for (const bfloat16 x : results[0][0]) CHECK(std::abs(to_float(x)) < 2);
}

TEST(more_requests_than_a_grid_has_in_one_dimension) {
  const AttentionShape shape{2, 1, 16, 16, 0, 0.25f};
  const int64_t requests = 70'000, width = (2 + 2) * 16;
  Array<bfloat16> qkv(numbers(requests * width, 1)), keys(numbers(256, 2)), values(numbers(256, 3)), out(requests * 32);
  std::vector<int32_t> starts(requests + 1), contexts(requests, 16), tables(requests, 0);
  for (int64_t r = 0; r <= requests; ++r) starts[r] = static_cast<int32_t>(r);
  const Array<int32_t> start(starts), context(contexts), table(tables);
  AttentionArgs<bfloat16> args;
  args.qkv = qkv.data();
  args.query_start = start.data();
  args.context_len = context.data();
  args.block_tables = table.data();
  args.block_table_width = 1;
  args.num_tokens = args.num_requests = requests;
  args.max_context = 16;
  args.shape = shape;
  args.keys = keys.data();
  args.values = values.data();
  args.out = out.data();
  attention_plain(stream(), args);
  const auto expected = out.get((requests - 1) * 32, 32);
  const DecodeScratch need = attention_decode_scratch(stream(), requests, 16, shape);
  Array<float> partials(need.partial_floats);
  Array<unsigned> counters(std::vector<unsigned>(need.counters, 0));
  attention_decode(stream(), args, partials.data(), counters.data());
  const auto got = out.get((requests - 1) * 32, 32);
  for (size_t i = 0; i < got.size(); ++i) CHECK(std::abs(to_float(got[i]) - to_float(expected[i])) < 0.02);
}

__global__ void nothing_kernel(int) {}

TEST(errors_name_the_call_the_place_and_what_to_do) {
  CHECK_THROWS(DeviceError, "cudaMemcpy(nullptr, nullptr, 1, cudaMemcpyDeviceToHost) failed with cudaErrorInvalidValue",
               TV_CUDA(cudaMemcpy(nullptr, nullptr, 1, cudaMemcpyDeviceToHost)));
  CHECK_THROWS(DeviceError, "test_large.cu:", TV_CUDA(cudaMemcpy(nullptr, nullptr, 1, cudaMemcpyDeviceToHost)));
  void* p = nullptr;
  CHECK_THROWS(OutOfMemoryError, "lower gpu_memory_utilization", TV_CUDA(cudaMalloc(&p, size_t{1} << 50)));
  Array<bfloat16> x(8);
  CHECK_THROWS(DeviceError,
               "too much failed with cudaErrorInvalidValue",  // a launch that asks for 1 GB of shared memory
               launch(stream(), "too much", nothing_kernel, dim3(1), 32, size_t{1} << 30, 1));
  CHECK_EQ(cudaGetLastError(), cudaSuccess);  // and it is not reported a second time
  rms_norm(stream(), x.data(), x.data(), 1e-5f, x.data(), 1, 8);
  TV_CUDA(cudaStreamSynchronize(stream().handle));
}

}  // namespace
}  // namespace tiny_vllm
