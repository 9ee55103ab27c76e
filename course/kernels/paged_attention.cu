// Decode attention four times, one idea each, and twice wrong: docs/course/18-paged-attention.md tells the story. The
// engine's own is cuda/kernels/attention_decode.cu, which does the fourth with bfloat16 and tensor cores.
//
//   query (R, H, Dh), one token a request; its keys and values, of which context_len[r] are seen -> out (R, H, Dh)
//
//   contiguous cache  (R, Hk, S, Dh)     a stretch of S places for each request
//   paged cache       (NB, Hk, BS, Dh)   block_tables (R, B) says where
//
// float32, Dh = 64. Compiles with nvcc, and with g++ for a CPU (simt.h): python -m tiny_vllm.course 18 does either.
#include "simt.h"

constexpr int kDim = 64;          // Dh
constexpr int kEach = kDim / 32;  // numbers of a row that a lane holds: lane, lane + 32
constexpr int kWarps = 4;         // of a block of threads
constexpr int kMaxGroup = 8;      // query heads that share a KV head, at most

struct Args {
  const float *query, *keys, *values;
  const int *tables, *context_len;
  float *out, *partials;
  int heads, kv_heads, block_size, width, splits;  // width: B, entries of a block table
  float scale;
};

__device__ float warp_sum(float value) {
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffff, value, mask);
  return value;
}

// The softmax of one query over the keys that this warp has seen (chapter 10). A lane holds its part of `out`.
struct State {
  float max = -INFINITY, sum = 0, out[kEach] = {};
};

__device__ void load(const float* row, float (&x)[kEach]) {
  for (int e = 0; e < kEach; ++e) x[e] = row[threadIdx.x % 32 + 32 * e];
}

__device__ float dot(const float (&a)[kEach], const float (&b)[kEach]) {
  float sum = 0;
  for (int e = 0; e < kEach; ++e) sum += a[e] * b[e];
  return warp_sum(sum);
}

// One more key, with its score and its value.
__device__ void see(State& s, float score, const float (&value)[kEach]) {
  const float max = fmaxf(s.max, score);
  if (max == -INFINITY) return;  // nothing but masked keys so far
  const float factor = expf(s.max - max), weight = expf(score - max);
  s.max = max;
  s.sum = s.sum * factor + weight;
  for (int e = 0; e < kEach; ++e) s.out[e] = s.out[e] * factor + weight * value[e];
}

// All that another state has seen.
__device__ void merge(State& s, float max, float sum, const float (&out)[kEach]) {
  if (sum == 0) return;  // it has seen nothing, and its maximum is -infinity
  const float larger = fmaxf(s.max, max), mine = expf(s.max - larger), theirs = expf(max - larger);
  s.max = larger;
  s.sum = s.sum * mine + sum * theirs;
  for (int e = 0; e < kEach; ++e) s.out[e] = s.out[e] * mine + out[e] * theirs;
}

// Where each warp leaves what it has seen of query head g, for warp 0 to merge.
struct Meeting {
  float max[kWarps][kMaxGroup], sum[kWarps][kMaxGroup], out[kWarps][kMaxGroup][kDim];
};

// The states of all warps in one, which warp 0 gets. All threads of the block must come.
__device__ void merge_warps(State& s, Meeting& room, int g) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) room.max[warp][g] = s.max, room.sum[warp][g] = s.sum;
  for (int e = 0; e < kEach; ++e) room.out[warp][g][lane + 32 * e] = s.out[e];
  __syncthreads();
  for (int w = 1; w < kWarps && warp == 0; ++w) {
    float out[kEach];
    load(room.out[w][g], out);
    merge(s, room.max[w][g], room.sum[w][g], out);
  }
}

__device__ void write(const State& s, float* out) {
  for (int e = 0; e < kEach; ++e) out[threadIdx.x % 32 + 32 * e] = s.sum == 0 ? 0 : s.out[e] / s.sum;
}

// 1. A contiguous cache. A block of threads for each request and query head; each warp takes every fourth key.
__global__ void contiguous(Args a) {
  __shared__ Meeting room;
  const int request = blockIdx.x, head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads), warp = threadIdx.x / 32;
  const int places = a.width * a.block_size;  // S
  const int64_t first = (int64_t(request) * a.kv_heads + kv_head) * places;
  float query[kEach], key[kEach], value[kEach];
  load(a.query + (int64_t(request) * a.heads + head) * kDim, query);
  State state;
  for (int p = warp; p < a.context_len[request]; p += kWarps) {
    load(a.keys + (first + p) * kDim, key);
    load(a.values + (first + p) * kDim, value);
    see(state, dot(query, key) * a.scale, value);
  }
  merge_warps(state, room, 0);
  if (warp == 0) write(state, a.out + (int64_t(request) * a.heads + head) * kDim);
}

// Where the key of position p lies, in rows of the cache.
__device__ int64_t row_of(const Args& a, int request, int kv_head, int p) {
  const int block = a.tables[int64_t(request) * a.width + p / a.block_size];
  return (int64_t(block) * a.kv_heads + kv_head) * a.block_size + p % a.block_size;
}

// 2. A paged cache: the same, but for one look into the block table.
__global__ void paged(Args a) {
  __shared__ Meeting room;
  const int request = blockIdx.x, head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads), warp = threadIdx.x / 32;
  float query[kEach], key[kEach], value[kEach];
  load(a.query + (int64_t(request) * a.heads + head) * kDim, query);
  State state;
  for (int p = warp; p < a.context_len[request]; p += kWarps) {
    const int64_t row = row_of(a, request, kv_head, p);
    load(a.keys + row * kDim, key);
    load(a.values + row * kDim, value);
    see(state, dot(query, key) * a.scale, value);
  }
  merge_warps(state, room, 0);
  if (warp == 0) write(state, a.out + (int64_t(request) * a.heads + head) * kDim);
}

// Keys [begin, end) for all query heads of a KV head: a key is loaded once, and used `group` times.
__device__ void attend(const Args& a, int request, int kv_head, int begin, int end, State (&states)[kMaxGroup]) {
  const int group = a.heads / a.kv_heads;
  float queries[kMaxGroup][kEach], key[kEach], value[kEach];
#pragma unroll  // so that states and queries stay in registers
  for (int g = 0; g < kMaxGroup; ++g)
    if (g < group) load(a.query + (int64_t(request) * a.heads + kv_head * group + g) * kDim, queries[g]);
  for (int p = begin + threadIdx.x / 32; p < end; p += kWarps) {
    const int64_t row = row_of(a, request, kv_head, p);
    load(a.keys + row * kDim, key);
    load(a.values + row * kDim, value);
#pragma unroll
    for (int g = 0; g < kMaxGroup; ++g)
      if (g < group) see(states[g], dot(queries[g], key) * a.scale, value);
  }
}

// 3. A block of threads for each request and KV head.
__global__ void grouped(Args a) {
  __shared__ Meeting room;
  const int request = blockIdx.x, kv_head = blockIdx.y, group = a.heads / a.kv_heads;
  State states[kMaxGroup];
  attend(a, request, kv_head, 0, a.context_len[request], states);
#pragma unroll
  for (int g = 0; g < kMaxGroup; ++g) {
    if (g >= group) break;
    merge_warps(states[g], room, g);
    if (threadIdx.x < 32) write(states[g], a.out + (int64_t(request) * a.heads + kv_head * group + g) * kDim);
  }
}

// 4. The context cut into splits, a block of threads each. What it has seen goes to partials (R, H, splits, Dh + 2).
__global__ void split(Args a) {
  __shared__ Meeting room;
  const int request = blockIdx.x, kv_head = blockIdx.y, group = a.heads / a.kv_heads;
  const int context = a.context_len[request], each = (context + a.splits - 1) / a.splits;
  const int begin = min(context, int(blockIdx.z) * each), end = min(context, begin + each);
  State states[kMaxGroup];
  attend(a, request, kv_head, begin, end, states);
#pragma unroll
  for (int g = 0; g < kMaxGroup; ++g) {
    if (g >= group) break;
    merge_warps(states[g], room, g);
    if (threadIdx.x >= 32) continue;
    const int64_t head = int64_t(request) * a.heads + kv_head * group + g;
    float* partial = a.partials + (head * a.splits + blockIdx.z) * (kDim + 2);
    for (int e = 0; e < kEach; ++e) partial[threadIdx.x + 32 * e] = states[g].out[e];
    if (threadIdx.x == 0) partial[kDim] = states[g].max, partial[kDim + 1] = states[g].sum;
  }
}

// ... and merged. One warp for each request and query head.
__global__ void merge_splits(Args a) {
  const int64_t head = int64_t(blockIdx.x) * a.heads + blockIdx.y;
  State state;
  for (int s = 0; s < a.splits; ++s) {
    const float* partial = a.partials + (head * a.splits + s) * (kDim + 2);
    float out[kEach];
    load(partial, out);
    merge(state, partial[kDim], partial[kDim + 1], out);
  }
  write(state, a.out + head * kDim);
}

// 5. Wrong: goes through all of the request's row of the table, which is filled up with 0 behind its last block.
__global__ void trusting(Args a) {
  __shared__ Meeting room;
  const int request = blockIdx.x, head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads), warp = threadIdx.x / 32;
  float query[kEach], key[kEach], value[kEach];
  load(a.query + (int64_t(request) * a.heads + head) * kDim, query);
  State state;
  for (int p = warp; p < a.width * a.block_size; p += kWarps) {
    const int64_t row = row_of(a, request, kv_head, p);
    load(a.keys + row * kDim, key);
    load(a.values + row * kDim, value);
    see(state, dot(query, key) * a.scale, value);
  }
  merge_warps(state, room, 0);
  if (warp == 0) write(state, a.out + (int64_t(request) * a.heads + head) * kDim);
}

// 6. Wrong: whole blocks, and a score of -infinity for what lies behind the end of the context.
__global__ void masked(Args a) {
  __shared__ Meeting room;
  const int request = blockIdx.x, head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads), warp = threadIdx.x / 32;
  const int context = a.context_len[request];
  float query[kEach], key[kEach], value[kEach];
  load(a.query + (int64_t(request) * a.heads + head) * kDim, query);
  State state;
  for (int p = warp; p < (context + a.block_size - 1) / a.block_size * a.block_size; p += kWarps) {
    const int64_t row = row_of(a, request, kv_head, p);
    load(a.keys + row * kDim, key);
    load(a.values + row * kDim, value);
    const float score = dot(query, key) * a.scale;
    see(state, p < context ? score : -INFINITY, value);
  }
  merge_warps(state, room, 0);
  if (warp == 0) write(state, a.out + (int64_t(request) * a.heads + head) * kDim);
}

// Runs version 1 ... 6 on host arrays; `rows` are those of the cache. *ms is the time of its fastest run.
extern "C" const char* paged_attention(int version, const float* query, const float* keys, const float* values,
                                       const int* tables, const int* context_len, float* out, int requests, int heads,
                                       int kv_heads, int block_size, int width, int rows, int splits, float scale,
                                       float* ms) {
  return report([&] {
    if (heads % kv_heads != 0 || heads / kv_heads > kMaxGroup) throw std::runtime_error("at most 8 query heads share");
    const size_t queries = size_t(requests) * heads;
    const DeviceArray<float> q(query, queries * kDim), k(keys, size_t(rows) * kDim), v(values, size_t(rows) * kDim);
    const DeviceArray<float> result(out, queries * kDim), partials(queries * splits * (kDim + 2));
    const DeviceArray<int> table(tables, size_t(requests) * width), context(context_len, requests);
    const Args a = {q.get(), k.get(),  v.get(),    table.get(), context.get(), result.get(), partials.get(),
                    heads,   kv_heads, block_size, width,       splits,        scale};
    const dim3 by_head(requests, heads), by_kv_head(requests, kv_heads), by_split(requests, kv_heads, splits);
    *ms = milliseconds_of([&] {
      if (version == 1) launch(contiguous, by_head, 32 * kWarps, a);
      if (version == 2) launch(paged, by_head, 32 * kWarps, a);
      if (version == 3) launch(grouped, by_kv_head, 32 * kWarps, a);
      if (version == 4) launch(split, by_split, 32 * kWarps, a);
      if (version == 4) launch(merge_splits, by_head, 32, a);
      if (version == 5) launch(trusting, by_head, 32 * kWarps, a);
      if (version == 6) launch(masked, by_head, 32 * kWarps, a);
    });
    result.copy_to(out);
  });
}
