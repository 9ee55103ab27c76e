// Every kernel as its definition reads, with sums in double: what the fast ones are compared with.
// As cpu_isa="reference" the whole engine runs on it, slowly.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/kernels.h"

namespace tiny_vllm {

namespace {

template <typename T>
void matmul(const MatmulArgs<T>& args, int64_t n_begin, int64_t n_end) {
  for (int64_t m = 0; m < args.m; ++m) {
    for (int64_t n = n_begin; n < n_end; ++n) {
      double sum = args.bias ? to_float(args.bias[n]) : 0;
      for (int64_t k = 0; k < args.k; ++k) {
        sum += double{to_float(args.x[m * args.k + k])} * to_float(args.weight[n * args.k + k]);
      }
      const float result = static_cast<float>(sum);
      if (args.out_is_float) {
        static_cast<float*>(args.out)[m * args.n + n] = result;
      } else {
        T& out = static_cast<T*>(args.out)[m * args.n + n];
        const T product = from_float<T>(result);
        out = args.add ? from_float<T>(to_float(out) + to_float(product)) : product;
      }
    }
  }
}

template <typename T>
T rounded(double x) {
  return from_float<T>(static_cast<float>(x));
}

template <typename T>
void rms_norm_row(const T* x, const T* weight, float eps, T* out, int64_t dim) {
  double squares = 0;
  for (int64_t i = 0; i < dim; ++i) squares += double{to_float(x[i])} * to_float(x[i]);
  const double inverse_rms = 1 / std::sqrt(squares / static_cast<double>(dim) + eps);
  for (int64_t i = 0; i < dim; ++i) {
    const T normalised = rounded<T>(to_float(x[i]) * inverse_rms);
    out[i] = rounded<T>(double{to_float(normalised)} * to_float(weight[i]));
  }
}

template <typename T>
void rms_norm(const T* x, const T* weight, float eps, T* out, int64_t rows, int64_t dim) {
  for (int64_t row = 0; row < rows; ++row) rms_norm_row(x + row * dim, weight, eps, out + row * dim, dim);
}

// Half-split: element i turns together with element i + Dh/2. head may be out.
template <typename T>
void rotate(const T* head, const float* cos_sin, int64_t half, T* out) {
  for (int64_t i = 0; i < half; ++i) {
    const double cos = cos_sin[2 * i], sin = cos_sin[2 * i + 1];
    const double a = to_float(head[i]), b = to_float(head[half + i]);
    out[i] = rounded<T>(a * cos - b * sin);
    out[half + i] = rounded<T>(b * cos + a * sin);
  }
}

template <typename T>
void rope_and_cache(const RopeArgs<T>& args, int64_t begin, int64_t end) {
  const AttentionShape& s = args.shape;
  const int64_t dim = s.head_dim;
  for (int64_t t = begin; t < end; ++t) {
    const float* cos_sin = args.cos_sin + t * dim;
    T* queries = args.qkv + t * (s.num_heads + 2 * s.num_kv_heads) * dim;
    T* keys = queries + s.num_heads * dim;
    const T* values = keys + s.num_kv_heads * dim;
    for (int64_t h = 0; h < s.num_heads; ++h) {
      T* head = queries + h * dim;
      if (args.q_norm) rms_norm_row(head, args.q_norm, args.eps, head, dim);
      rotate(head, cos_sin, dim / 2, head);
    }
    const int64_t block = args.slot_mapping[t] / s.block_size, offset = args.slot_mapping[t] % s.block_size;
    for (int64_t h = 0; h < s.num_kv_heads; ++h) {
      const int64_t at = ((block * s.num_kv_heads + h) * s.block_size + offset) * dim;
      T* head = keys + h * dim;
      if (args.k_norm) rms_norm_row(head, args.k_norm, args.eps, head, dim);
      rotate(head, cos_sin, dim / 2, args.keys + at);
      for (int64_t i = 0; i < dim; ++i) args.values[at + i] = values[h * dim + i];
    }
  }
}

template <typename T>
void attention(const AttentionArgs<T>& args, const AttentionItem& item, float*) {
  const AttentionShape& s = args.shape;
  const int64_t dim = s.head_dim;
  const int64_t first_token = args.query_start[item.request];
  const int64_t tokens = args.query_start[item.request + 1] - first_token;
  const int32_t* block_table = args.block_tables + item.request * args.block_table_width;
  const auto offset = [&](int64_t position) {
    const int64_t block = block_table[position / s.block_size];
    return ((block * s.num_kv_heads + item.kv_head) * s.block_size + position % s.block_size) * dim;
  };

  std::vector<double> weights, out(dim);
  for (int64_t row = item.row_begin; row < item.row_end; ++row) {
    const int64_t token = row / args.group(), head = item.kv_head * args.group() + row % args.group();
    const int64_t position = args.context_len[item.request] - tokens + token;
    const int64_t oldest = s.sliding_window > 0 ? std::max<int64_t>(0, position - s.sliding_window + 1) : 0;
    const T* query = args.qkv + ((first_token + token) * (s.num_heads + 2 * s.num_kv_heads) + head) * dim;

    weights.clear();
    double max = -std::numeric_limits<double>::infinity();
    for (int64_t j = oldest; j <= position; ++j) {
      double score = 0;
      for (int64_t i = 0; i < dim; ++i) score += double{to_float(query[i])} * to_float(args.keys[offset(j) + i]);
      weights.push_back(score * s.scale);
      max = std::max(max, weights.back());
    }
    double sum = 0;
    for (double& w : weights) sum += w = std::exp(w - max);

    std::fill(out.begin(), out.end(), 0.0);
    for (int64_t j = oldest; j <= position; ++j) {
      const double weight = weights[j - oldest] / sum;
      for (int64_t i = 0; i < dim; ++i) out[i] += weight * to_float(args.values[offset(j) + i]);
    }
    T* result = args.out + ((first_token + token) * s.num_heads + head) * dim;
    for (int64_t i = 0; i < dim; ++i) result[i] = rounded<T>(out[i]);
  }
}

double activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kGelu:
      return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
  }
  return 0;
}

template <typename T>
void act_mul(const T* gate_up, Activation activation, T* out, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row) {
    const T* gate = gate_up + row * 2 * width;
    for (int64_t i = 0; i < width; ++i) {
      const T activated = rounded<T>(activate(activation, to_float(gate[i])));
      out[row * width + i] = rounded<T>(double{to_float(activated)} * to_float(gate[width + i]));
    }
  }
}

uint64_t read_all(const void* data, int64_t bytes) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < bytes / 8; ++i) sum ^= static_cast<const uint64_t*>(data)[i];
  return sum;
}

template <typename T>
constexpr Kernels<T> kernels_of() {
  return {matmul<T>, rms_norm<T>, rope_and_cache<T>, attention<T>, nullptr, act_mul<T>};
}

}  // namespace

const CpuKernels* reference_kernels() {
  static constexpr CpuKernels table = {"reference", kernels_of<bfloat16>(), kernels_of<float>(), read_all};
  return &table;
}

}  // namespace tiny_vllm
