// The thread pool, and the ops that run on it. Built with ThreadSanitizer too, which sees races that no result shows.
#include "cpu/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "check.h"

namespace tiny_vllm {
namespace {

bool all_ones(const std::vector<int>& v) {
  return std::all_of(v.begin(), v.end(), [](int x) { return x == 1; });
}

TEST(thread_pool_visits_each_index_once) {
  ThreadPool pool(4);
  CHECK_EQ(pool.num_threads(), 4);
  for (int64_t n : {0, 1, 2, 3, 4, 5, 63, 64, 1000}) {
    for (int64_t grain : {1, 7, 2000}) {
      std::vector<int> visits(static_cast<size_t>(n), 0);  // not atomic: parts must be disjoint
      pool.parallel_for(n, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
      });
      CHECK(all_ones(visits));
    }
    std::vector<int> visits(static_cast<size_t>(n), 0);
    pool.parallel_items(n, [&](int64_t i) { ++visits[static_cast<size_t>(i)]; });
    CHECK(all_ones(visits));
  }
}

TEST(thread_pool_loops_see_what_earlier_loops_wrote) {
  ThreadPool pool(3);
  std::vector<int64_t> sums(97, 0);
  for (int round = 0; round < 2000; ++round) {
    pool.parallel_for(97, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) sums[static_cast<size_t>(i)] += i;
    });
  }
  CHECK_EQ(std::accumulate(sums.begin(), sums.end(), int64_t{0}), 2000 * 96 * 97 / 2);
}

TEST(thread_pool_hands_an_exception_to_the_caller_and_goes_on) {
  ThreadPool pool(4);
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> ended{0};
    CHECK_THROWS(std::runtime_error, "part", pool.parallel_for(4, 1, [&](int64_t begin, int64_t) {
      ++ended;
      if (begin != 1) throw std::runtime_error("part");
    }));
    CHECK_EQ(ended.load(), 4);  // all parts have ended before the caller hears of it
  }
  std::atomic<int> after{0};
  pool.parallel_items(10, [&](int64_t) { ++after; });
  CHECK_EQ(after.load(), 10);
}

TEST(thread_pool_loop_in_a_loop_and_two_callers) {
  ThreadPool pool(3);
  std::atomic<int64_t> total{0};
  auto caller = [&] {
    for (int round = 0; round < 200; ++round) {
      pool.parallel_for(6, 1, [&](int64_t begin, int64_t end) {
        pool.parallel_for(end - begin, 1, [&](int64_t b, int64_t e) { total += e - b; });
      });
    }
  };
  std::thread other(caller);
  caller();
  other.join();
  CHECK_EQ(total.load(), 2 * 200 * 6);
}

TEST(thread_pools_come_and_go) {
  for (int round = 0; round < 100; ++round) {
    ThreadPool pool(1 + round % 4);
    int64_t last = -1;
    if (round % 3 != 0) pool.parallel_for(1, 1, [&](int64_t, int64_t end) { last = end; });
    CHECK_EQ(last, round % 3 != 0 ? 1 : -1);
  }
  CHECK(available_cpus() >= 1);
}

// A small deterministic stream in [-1, 1).
struct Numbers {
  uint32_t state = 12345;
  float next() {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
  }
};

struct Op {
  std::string name;
  std::vector<char> bytes;
};

// Runs the ops on one batch of a long prefill, a short one and a decode, and returns what each wrote.
template <typename T>
std::vector<Op> run_ops(const std::string& isa, int num_threads) {
  constexpr int64_t kTokens = 41, kHeads = 4, kKvHeads = 2, kHeadDim = 32, kBlockSize = 16, kBlocks = 6;
  constexpr int64_t kHidden = kHeads * kHeadDim, kQkv = (kHeads + 2 * kKvHeads) * kHeadDim, kWide = 96;
  std::unique_ptr<Backend> backend = make_backend({.device = "cpu", .num_threads = num_threads, .cpu_isa = isa});
  Numbers numbers;
  std::vector<Buffer> kept;
  auto tensor = [&](std::initializer_list<int64_t> dims, bool poison = false) {
    Tensor t(nullptr, dtype_of<T>(), dims);
    kept.push_back(backend->allocate(t.nbytes()));
    t.data = kept.back().get();
    for (int64_t i = 0; i < t.numel(); ++i)
      t.as<T>()[i] = from_float<T>(poison ? std::numeric_limits<float>::quiet_NaN() : numbers.next());
    return t;
  };
  std::vector<Op> results;
  auto keep = [&](const char* name, const Tensor& t) {
    for (int64_t i = 0; i < t.numel(); ++i) {
      if (std::isnan(to_float(t.as<T>()[i]))) testing::fail(__FILE__, __LINE__, std::string(name) + " left a hole");
    }
    const char* data = static_cast<const char*>(t.data);
    results.push_back({name, std::vector<char>(data, data + t.nbytes())});
  };

  StepBatch step;
  step.query_start = {0, 33, 40, 41};
  step.context_len = {33, 7, 20};
  step.block_table_width = 3;
  step.block_tables = {0, 1, 2, 3, -1, -1, 4, 5, -1};
  for (int r = 0; r < 3; ++r) {
    for (int row = step.query_start[r]; row < step.query_start[r + 1]; ++row) {
      const int position = step.context_len[r] - (step.query_start[r + 1] - row);
      step.token_ids.push_back(0);
      step.positions.push_back(position);
      step.slot_mapping.push_back(step.block_tables[3 * r + position / kBlockSize] * kBlockSize +
                                  position % kBlockSize);
    }
  }
  for (int64_t i = 0; i < kTokens * kHeadDim; ++i) step.cos_sin.push_back(numbers.next());
  const DeviceBatch batch = backend->upload(step);
  const AttentionShape shape = {.num_heads = kHeads,
                                .num_kv_heads = kKvHeads,
                                .head_dim = kHeadDim,
                                .block_size = kBlockSize,
                                .sliding_window = 0,
                                .scale = 0.2f};

  const PagedKv kv = {tensor({kBlocks, kKvHeads, kBlockSize, kHeadDim}),   // the decode reads earlier keys
                      tensor({kBlocks, kKvHeads, kBlockSize, kHeadDim})};  // and values
  const Tensor qkv = tensor({kTokens, kQkv});
  const Tensor attention = tensor({kTokens, kHidden}, true);
  backend->rope_and_cache(qkv, {}, {}, 1e-5f, batch, shape, kv);
  backend->paged_attention(qkv, batch, shape, kv, attention);
  keep("keys", kv.keys);
  keep("values", kv.values);
  keep("paged_attention", attention);

  const Tensor normed = tensor({kTokens, kHidden}, true);
  backend->rms_norm(attention, tensor({kHidden}), 1e-5f, normed);
  keep("rms_norm", normed);
  const Tensor gate_up = tensor({kTokens, 2 * kWide}, true);
  backend->matmul(normed, tensor({2 * kWide, kHidden}), tensor({2 * kWide}), gate_up);
  keep("matmul", gate_up);
  const Tensor activated = tensor({kTokens, kWide}, true);
  backend->act_mul(gate_up, Activation::kSilu, activated);
  keep("act_mul", activated);
  return results;
}

TEST(thread_pool_ops_give_the_same_bits_for_any_number_of_threads) {
  for (const char* isa : {"auto", "portable"}) {
    for (bool narrow : {false, true}) {
      const std::vector<Op> one = narrow ? run_ops<bfloat16>(isa, 1) : run_ops<float>(isa, 1);
      for (int threads : {2, 3, 5}) {
        const std::vector<Op> many = narrow ? run_ops<bfloat16>(isa, threads) : run_ops<float>(isa, threads);
        for (size_t i = 0; i < one.size(); ++i) {
          if (one[i].bytes != many[i].bytes) {
            testing::fail(__FILE__, __LINE__, one[i].name + " on " + isa + ", " + std::to_string(threads) + " threads");
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tiny_vllm
