// Embedding three times, one idea each, and what becomes of an offset of 32 bits: docs/course/05-embeddings.md tells
// the story. The engine has the last of the three in cuda/kernels/gather_rows.cu.
//
//   out (n, D) = table (V, D)[ids (n)], of numbers of 2 bytes: bfloat16, but nobody looks at them
//
// Compiles with nvcc, and with g++ for a CPU (simt.h): python -m tiny_vllm.course 5 does either.
#include "simt.h"

// 1. One thread a row.
__global__ void row_a_thread(const uint16_t* table, const int* ids, uint16_t* out, int n, int dim) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= n) return;
  const uint16_t* from = table + int64_t(ids[t]) * dim;
  uint16_t* to = out + int64_t(t) * dim;
  for (int i = 0; i < dim; ++i) to[i] = from[i];
}

// 2. One thread an element: number e of all that are to be written.
__global__ void element_a_thread(const uint16_t* table, const int* ids, uint16_t* out, int n, int dim) {
  const int64_t e = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (e >= int64_t(n) * dim) return;
  const int64_t t = e / dim, i = e % dim;
  out[e] = table[int64_t(ids[t]) * dim + i];
}

// Eight numbers that are moved with one instruction.
struct alignas(16) Eight {
  uint16_t at[8];
};

// 3. One block a row, 16 bytes a thread: dim is a multiple of 8.
__global__ void eight_a_thread(const uint16_t* table, const int* ids, uint16_t* out, int, int dim) {
  const int width = dim / 8;
  const Eight* from = reinterpret_cast<const Eight*>(table) + int64_t(ids[blockIdx.x]) * width;
  Eight* to = reinterpret_cast<Eight*>(out) + int64_t(blockIdx.x) * width;
  for (int i = threadIdx.x; i < width; i += blockDim.x) to[i] = from[i];
}

constexpr int kThreads = 64;

// Runs version 1 ... 3 on host arrays; *ms is the time of its fastest run.
extern "C" const char* embedding(int version, const uint16_t* table, int vocab, const int* ids, uint16_t* out, int n,
                                 int dim, float* ms) {
  return report([&] {
    if (dim % 8 != 0) throw std::runtime_error("dim must be a multiple of 8");
    void (*const kernels[])(const uint16_t*, const int*, uint16_t*, int, int) = {row_a_thread, element_a_thread,
                                                                                 eight_a_thread};
    const int64_t threads[] = {n, int64_t(n) * dim, int64_t(n) * kThreads};  // that are needed
    const DeviceArray<uint16_t> rows(table, size_t(vocab) * dim), result(out, size_t(n) * dim);
    const DeviceArray<int> numbers(ids, n);
    const auto blocks = static_cast<unsigned>((threads[version - 1] + kThreads - 1) / kThreads);
    *ms = milliseconds_of(
        [&] { launch(kernels[version - 1], blocks, kThreads, rows.get(), numbers.get(), result.get(), n, dim); });
    result.copy_to(out);
  });
}

// Where row `id` of a table with `dim` columns begins, as three programs work it out.
__global__ void where_kernel(const int* ids, int dim, int64_t* places, int n) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= n) return;
  const unsigned product = unsigned(ids[t]) * unsigned(dim);  // what a processor makes of ids[t] * dim
  places[3 * t] = int64_t(ids[t]) * dim;                      // 64 bits
  places[3 * t + 1] = int(product);                           // int offset = ids[t] * dim
  places[3 * t + 2] = product * 2u / 2;                       // unsigned bytes = ids[t] * dim * 2, in elements again
}

extern "C" const char* where(const int* ids, int n, int dim, int64_t* places) {
  return report([&] {
    const DeviceArray<int> numbers(ids, n);
    const DeviceArray<int64_t> result(places, size_t(n) * 3);
    launch(where_kernel, (n + kThreads - 1) / kThreads, kThreads, numbers.get(), dim, result.get(), n);
    result.copy_to(places);
  });
}
