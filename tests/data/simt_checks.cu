// What tests/test_simt.py runs, on a GPU and on the CPU that plays one.
#include "simt.h"

__global__ void indices(int* out) {
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1000 * block + thread;
}

__global__ void shuffles(int* out) {  // (3, 64)
  const int t = threadIdx.x;
  out[t] = __shfl_xor_sync(0xffffffff, t, 5);
  out[64 + t] = __shfl_down_sync(0xffffffff, t, 10);
  out[128 + t] = __shfl_sync(0xffffffff, t, 35);
}

// Each thread reads what its neighbour wrote, round after round.
__global__ void barriers(int* out) {
  __shared__ int room[96];
  room[threadIdx.x] = threadIdx.x;
  for (int round = 0; round < 96; ++round) {
    __syncthreads();
    const int next = room[(threadIdx.x + 1) % 96];
    __syncthreads();
    room[threadIdx.x] = next + 1;
  }
  out[blockIdx.x * 96 + threadIdx.x] = room[threadIdx.x];
}

// Threads that have ended are not waited for.
__global__ void early_exit(int* out) {
  if (threadIdx.x >= 40) return;
  __shared__ int room[40];
  room[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = room[39 - threadIdx.x];
}

__global__ void counts(int* out) { atomicAdd(out, 1); }

__global__ void warps(int* out) {
  __shared__ int room[64];
  room[threadIdx.x] = threadIdx.x;
  __syncwarp();
  out[threadIdx.x] = room[threadIdx.x ^ 1];
}

__global__ void lost(int* out) {  // never run on a GPU
  if (threadIdx.x < 32) __syncthreads();
  __syncwarp();
  if (threadIdx.x >= 32) {
    __shfl_xor_sync(0xffffffff, 1, 1);
    __syncthreads();
    __syncthreads();
  }
  if (threadIdx.x % 2 == 0) __syncwarp();
  if (threadIdx.x % 2 == 1) __syncthreads();
  out[threadIdx.x] = 1;
}

// Half of a warp, while the others wait for the block.
__global__ void half_of_a_warp(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(0xffffu, int(threadIdx.x), 1);
  __syncthreads();
  if (threadIdx.x >= 16) out[threadIdx.x] = __shfl_sync(0xffff0000u, int(threadIdx.x), -1);
}

__global__ void deep(int* out) {  // 300 KB of its own
  volatile float numbers[75'000];
  for (int i = 0; i < 75'000; ++i) numbers[i] = i;
  out[threadIdx.x] = static_cast<int>(numbers[threadIdx.x]);
}

__global__ void at(int* out, int place) { out[place] = 1; }
__global__ void doubles(float* out, int place) { out[place] *= 2; }

#ifndef __CUDACC__
__global__ void throws(int*) {
  if (threadIdx.x == 3) throw std::runtime_error("thread 3");
}
__global__ void launches(int* out) { launch(counts, 1, 1, out); }
#endif

extern "C" const char* check(const int* which, int* out, int n) {
  return report([&] {
    DeviceArray<int> result(out, n);
    switch (*which) {
      case 0:
        launch(indices, dim3(2, 3, 2), dim3(4, 2, 3), result.get());
        break;
      case 1:
        launch(shuffles, 1, 64, result.get());
        break;
      case 2:
        launch(barriers, 2, 96, result.get());
        break;
      case 3:
        launch(early_exit, 1, 64, result.get());
        break;
      case 4:
        launch(counts, 7, 33, result.get());
        break;
      case 5:
        launch(warps, 1, 64, result.get());
        break;
      case 6:
        launch(lost, 1, 64, result.get());
        break;
      case 7:
        launch(counts, 1, 1025, result.get());
        break;
      case 8:
        launch(half_of_a_warp, 1, 32, result.get());
        break;
      case 9:
        launch(deep, 1, 32, result.get());
        break;
      case 10:
        launch(counts, dim3(1, 65536), 1, result.get());
        break;
      case 11:
        launch(counts, 0, 1, result.get());
        break;
      case 12:
        launch(counts, 1, dim3(2147483664u, 2), result.get());
        break;
#ifndef __CUDACC__
      case 13:
        launch(throws, 1, 32, result.get());
        break;
      case 14:
        launch(launches, 1, 1, result.get());
        break;
      case 15:
        launch(at, 1, 1, result.get(), n);
        break;
      case 16:
        launch(at, 1, 1, result.get(), -1);
        break;
      case 17:
        DeviceArray<int>(n).copy_to(out);
        return;
      case 18:
        launch(doubles, 1, 1, reinterpret_cast<float*>(result.get()), n);
        break;
#endif
    }
    result.copy_to(out);
  });
}
