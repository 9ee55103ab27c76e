#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace tiny_vllm {
namespace {

// base^x as a correctly working float32 pow gives it.
float power(float base, float x) { return static_cast<float>(std::pow(static_cast<double>(base), x)); }

// base^(2i/Dh) for each pair i. (Dh/2)
std::vector<float> wavelengths(float base, int64_t head_dim) {
  std::vector<float> w(head_dim / 2);
  for (size_t i = 0; i < w.size(); ++i)
    w[i] = power(base, static_cast<float>(2 * i) / static_cast<float>(head_dim));  // over 2π
  return w;
}

std::vector<float> default_inv_freq(float base, int64_t head_dim) {
  std::vector<float> f = wavelengths(base, head_dim);
  for (float& x : f) x = 1.0f / x;
  return f;
}

// Position interpolation: every frequency is divided, so that factor times as many tokens span the trained angles.
void scale_linear(const RopeConfig& c, std::vector<float>& f) {
  for (float& x : f) x /= static_cast<float>(c.factor);
}

// Llama 3.1: pairs that turn often within the original length keep their frequency, those that turn less than
// low_freq_factor times are slowed down by `factor`, and in between the two are blended.
void scale_llama3(const RopeConfig& c, std::vector<float>& f) {
  const auto original = static_cast<float>(c.original_max_position);
  const auto low = static_cast<float>(c.low_freq_factor);
  const auto factor = static_cast<float>(c.factor);
  const auto low_wavelength = static_cast<float>(static_cast<double>(c.original_max_position) / c.low_freq_factor);
  const auto high_wavelength = static_cast<float>(static_cast<double>(c.original_max_position) / c.high_freq_factor);
  for (float& x : f) {
    const float wavelength = 1.0f / x * static_cast<float>(2 * std::numbers::pi);
    if (wavelength > low_wavelength) {
      x /= factor;
    } else if (wavelength >= high_wavelength) {
      const float turns = 1.0f / wavelength * original;
      const float smooth = (turns - low) / static_cast<float>(c.high_freq_factor - c.low_freq_factor);
      x = (1.0f - smooth) * x / factor + smooth * x;
    }
  }
}

// The pair (a fraction, in units of pairs) that turns `rotations` times within the original length.
double yarn_dimension(const RopeConfig& c, int64_t head_dim, double rotations) {
  return static_cast<double>(head_dim) *
         std::log(static_cast<double>(c.original_max_position) / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(c.theta));
}

// YaRN: fast pairs as trained, slow pairs interpolated, and a linear ramp over the pairs between them.
std::vector<float> yarn_inv_freq(const RopeConfig& c, int64_t head_dim) {
  double low = yarn_dimension(c, head_dim, c.beta_fast);
  double high = yarn_dimension(c, head_dim, c.beta_slow);
  if (c.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(head_dim - 1));
  if (low == high) high += 0.001;  // a step instead of a division by zero

  std::vector<float> f = wavelengths(static_cast<float>(c.theta), head_dim);
  for (size_t i = 0; i < f.size(); ++i) {
    const float as_trained = 1.0f / f[i];
    const float interpolated = 1.0f / (static_cast<float>(c.factor) * f[i]);
    const float ramp = (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low);
    const float keep = 1.0f - std::clamp(ramp, 0.0f, 1.0f);
    f[i] = interpolated * (1.0f - keep) + as_trained * keep;
  }
  return f;
}

// Dynamic NTK: the base grows with the length of the sequence, so that the slowest pair never turns further than it
// did in training, and the fastest keeps its frequency.
std::vector<float> dynamic_inv_freq(const RopeConfig& c, int64_t head_dim, int64_t sequence_length) {
  const float stretch =
      static_cast<float>(c.factor) * static_cast<float>(sequence_length) / static_cast<float>(c.original_max_position) -
      static_cast<float>(c.factor - 1);
  const auto exponent = static_cast<float>(static_cast<double>(head_dim) / static_cast<double>(head_dim - 2));
  return default_inv_freq(static_cast<float>(c.theta) * power(stretch, exponent), head_dim);
}

constexpr int32_t kTablePositions = 131072;  // whose angles are kept: 32 MB with head_dim 64

}  // namespace

Rope::Rope(const RopeConfig& config, int64_t head_dim, int64_t max_position_embeddings)
    : config_(config), head_dim_(head_dim) {
  TV_CHECK(head_dim > 0 && head_dim % 2 == 0, "rope rotates pairs: head_dim is ", head_dim);
  TV_CHECK(config.type != RopeType::kDynamic || head_dim > 2, "dynamic rope needs head_dim above 2");
  if (config_.original_max_position == 0) config_.original_max_position = max_position_embeddings;
  inv_freq_ = config.type == RopeType::kYarn ? yarn_inv_freq(config_, head_dim)
                                             : default_inv_freq(static_cast<float>(config.theta), head_dim);
  if (config.type == RopeType::kLinear) scale_linear(config_, inv_freq_);
  if (config.type == RopeType::kLlama3) scale_llama3(config_, inv_freq_);
  if (config.type == RopeType::kYarn) attention_scaling_ = static_cast<float>(config.attention_factor);
}

const std::vector<float>& Rope::inv_freq(int64_t sequence_length) const {
  if (!depends_on_length() || sequence_length <= config_.original_max_position) return inv_freq_;
  if (sequence_length != long_length_) {
    long_inv_freq_ = dynamic_inv_freq(config_, head_dim_, sequence_length);
    long_length_ = sequence_length;
  }
  return long_inv_freq_;
}

void Rope::cos_sin(int32_t position, int64_t sequence_length, float* out) const {
  TV_CHECK(position >= 0, "position ", position);
  if (depends_on_length() || position >= kTablePositions) return compute(position, inv_freq(sequence_length), out);
  // Sines take longer than all else that is done for a token on the host, and each is needed again and again.
  const auto row = static_cast<size_t>(head_dim_), known = table_.size() / row;
  const auto wanted = static_cast<size_t>(position) + 1;
  if (wanted > known) {
    table_.resize(std::max(wanted, known + known / 2) * row);
    for (size_t p = known; p < table_.size() / row; ++p)
      compute(static_cast<int32_t>(p), inv_freq_, table_.data() + p * row);
  }
  std::copy_n(table_.data() + static_cast<size_t>(position) * row, row, out);
}

void Rope::compute(int32_t position, const std::vector<float>& frequencies, float* out) const {
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double angle =
        static_cast<float>(position) * frequencies[i];  // rounded to float32, as the models are trained
    out[2 * i] = static_cast<float>(std::cos(angle)) * attention_scaling_;
    out[2 * i + 1] = static_cast<float>(std::sin(angle)) * attention_scaling_;
  }
}

}  // namespace tiny_vllm
