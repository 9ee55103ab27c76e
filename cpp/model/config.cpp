#include "model/config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "base/printable.h"
#include "model/json_fields.h"

namespace tiny_vllm {
namespace {

using nlohmann::json;

// ---- the families -----------------------------------------------------------------------------------------------

enum class AttentionBias : uint8_t { kNever, kByConfig, kQkvAlways };  // kByConfig: `attention_bias`, for q, k, v and o
enum class Window : uint8_t { kNever, kEveryLayer, kUpperLayers };     // kUpperLayers: with `use_sliding_window` only

// All that tells one family from another. Numbers are what the configuration class of transformers has for an absent
// key. To add a family that differs only in these ways, add a row.
struct Family {
  const char* model_type;
  const char* architecture;
  AttentionBias attention_bias = AttentionBias::kNever;
  bool has_mlp_bias = false;  // honours `mlp_bias`
  bool qk_norm = false;
  Window window = Window::kNever;
  int64_t sliding_window = 4096;
  int64_t max_window_layers = 28;
  int64_t head_dim = 0;      // 0: hidden_size / num_attention_heads
  int64_t num_kv_heads = 0;  // 0: num_attention_heads
  int64_t max_position_embeddings = 0;
  bool tie_word_embeddings = false;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
};

constexpr std::array kFamilies = {
    Family{.model_type = "llama",
           .architecture = "LlamaForCausalLM",
           .attention_bias = AttentionBias::kByConfig,
           .has_mlp_bias = true,
           .max_position_embeddings = 2048},
    Family{.model_type = "mistral",
           .architecture = "MistralForCausalLM",
           .window = Window::kEveryLayer,
           .num_kv_heads = 8,
           .max_position_embeddings = 131072},
    Family{.model_type = "qwen2",
           .architecture = "Qwen2ForCausalLM",
           .attention_bias = AttentionBias::kQkvAlways,
           .window = Window::kUpperLayers,
           .num_kv_heads = 32,
           .max_position_embeddings = 32768},
    Family{.model_type = "qwen3",
           .architecture = "Qwen3ForCausalLM",
           .attention_bias = AttentionBias::kByConfig,
           .qk_norm = true,
           .window = Window::kUpperLayers,
           .head_dim = 128,
           .num_kv_heads = 32,
           .max_position_embeddings = 32768},
};

// ---- fields that would change the result, and that the forward pass does not know --------------------------------

enum class Neutral : uint8_t { kNull, kFalse, kZero, kOne };  // the value, beside null, that changes nothing

struct UnknownFeature {
  const char* key;
  Neutral neutral;
};

constexpr std::array kUnknownFeatures = {
    UnknownFeature{"quantization_config", Neutral::kNull},
    UnknownFeature{"compression_config", Neutral::kNull},
    UnknownFeature{"text_config", Neutral::kNull},
    UnknownFeature{"vision_config", Neutral::kNull},
    UnknownFeature{"audio_config", Neutral::kNull},
    UnknownFeature{"is_encoder_decoder", Neutral::kFalse},
    UnknownFeature{"add_cross_attention", Neutral::kFalse},
    UnknownFeature{"num_experts", Neutral::kZero},
    UnknownFeature{"num_local_experts", Neutral::kZero},
    UnknownFeature{"n_routed_experts", Neutral::kZero},
    UnknownFeature{"partial_rotary_factor", Neutral::kOne},
    UnknownFeature{"rotary_pct", Neutral::kOne},
    UnknownFeature{"rope_interleaved", Neutral::kFalse},
    UnknownFeature{"use_mrope", Neutral::kFalse},
    UnknownFeature{"alibi", Neutral::kFalse},
    UnknownFeature{"no_rope_layers", Neutral::kNull},
    UnknownFeature{"no_rope_layer_interval", Neutral::kNull},
    UnknownFeature{"attention_chunk_size", Neutral::kNull},
    UnknownFeature{"attn_logit_softcapping", Neutral::kNull},
    UnknownFeature{"final_logit_softcapping", Neutral::kNull},
    UnknownFeature{"query_pre_attn_scalar", Neutral::kNull},
    UnknownFeature{"attention_multiplier", Neutral::kNull},
    UnknownFeature{"embedding_multiplier", Neutral::kOne},
    UnknownFeature{"residual_multiplier", Neutral::kOne},
    UnknownFeature{"logits_scaling", Neutral::kOne},
    UnknownFeature{"logit_scale", Neutral::kOne},
    UnknownFeature{"scale_emb", Neutral::kOne},
    UnknownFeature{"scale_depth", Neutral::kNull},
    UnknownFeature{"dim_model_base", Neutral::kNull},
    UnknownFeature{"clip_qkv", Neutral::kNull},
    UnknownFeature{"use_qk_norm", Neutral::kFalse},
    UnknownFeature{"qk_layernorm", Neutral::kFalse},
};

// ---- the parts of a configuration --------------------------------------------------------------------------------

constexpr int64_t kMaxWidth = 1 << 20;  // of any row of a weight matrix: keeps every product of sizes within 64 bits
constexpr int64_t kMaxInt32 = INT32_MAX;

std::string list_families() {
  std::string s;
  for (const Family& f : kFamilies) s += (s.empty() ? "" : ", ") + std::string(f.model_type);
  return s;
}

const Family& find_family(const Fields& fields) {
  const std::optional<std::string> type = fields.text("model_type");
  const std::vector<std::string> architectures = fields.texts("architectures").value_or(std::vector<std::string>{});
  const std::string architecture = architectures.empty() ? "" : architectures[0];
  if (!type) fields.refuse(str("model_type is missing; supported are ", list_families()));
  const auto family =
      std::find_if(kFamilies.begin(), kFamilies.end(), [&](const Family& f) { return *type == f.model_type; });
  if (family == kFamilies.end())
    fields.refuse(str("model_type '", printable(*type), "'",
                      architecture.empty() ? "" : " (architecture " + printable(architecture) + ")",
                      " is not supported; supported are ", list_families()));
  // A body without a head, a classifier or a reward model has the same model_type but other tensors.
  const bool known = architecture.empty() || architecture == family->architecture ||
                     (architecture == "LLaMAForCausalLM" && *type == "llama");  // as the first conversions spelled it
  if (!known)
    fields.refuse(str("architecture '", printable(architecture), "' is not supported; for model_type '", *type,
                      "' it must be ", family->architecture));
  return *family;
}

void refuse_unknown_features(const Fields& fields, const Family& family) {
  for (const UnknownFeature& feature : kUnknownFeatures) {
    const json* value = fields.find(feature.key);
    if (value == nullptr) continue;
    const bool harmless = (feature.neutral == Neutral::kFalse && *value == false) ||
                          (feature.neutral == Neutral::kZero && value->is_number() && *value == 0) ||
                          (feature.neutral == Neutral::kOne && value->is_number() && *value == 1);
    if (!harmless)
      fields.refuse(str(feature.key, value->is_primitive() ? " = " + printable(value->dump(), 40) : "",
                        " is not supported",
                        std::string_view(feature.key) == "quantization_config"
                            ? ": only weights in BF16, F16 or F32 can be read, use the model before quantization"
                            : ""));
  }
  if (!family.has_mlp_bias && fields.boolean("mlp_bias").value_or(false))
    fields.refuse(str("mlp_bias = true is not supported for model_type '", family.model_type, "'"));
  if (family.attention_bias == AttentionBias::kNever && fields.boolean("attention_bias").value_or(false))
    fields.refuse(str("attention_bias = true is not supported for model_type '", family.model_type, "'"));
}

Activation read_activation(const Fields& fields) {
  const std::string act = fields.text("hidden_act").value_or("silu");
  if (act == "silu" || act == "swish") return Activation::kSilu;
  if (act == "gelu") return Activation::kGelu;
  if (act == "gelu_pytorch_tanh" || act == "gelu_new") return Activation::kGeluTanh;
  fields.refuse(str("hidden_act '", printable(act),
                    "' is not supported; supported are silu, swish, gelu, gelu_pytorch_tanh, gelu_new"));
}

// Window of each layer. (L)
std::vector<int64_t> read_windows(const Fields& fields, const Family& family, int64_t num_layers) {
  const std::optional<int64_t> given = fields.integer("sliding_window", 1, kMaxInt32);
  const std::optional<bool> use = fields.boolean("use_sliding_window");
  const int64_t window = given ? *given : fields.has_key("sliding_window") ? 0 : family.sliding_window;

  std::vector<int64_t> windows(num_layers, 0);
  if (family.window == Window::kNever) {
    if (given && use.value_or(true))
      fields.refuse(str("sliding_window = ", *given, " is not supported for model_type '", family.model_type, "'"));
  } else if (family.window == Window::kEveryLayer) {
    std::fill(windows.begin(), windows.end(), window);
  } else if (use.value_or(false)) {
    const int64_t first = fields.integer("max_window_layers", 0, kMaxInt32).value_or(family.max_window_layers);
    for (int64_t l = first; l < num_layers; ++l) windows[l] = window;
  }

  const auto types = fields.texts("layer_types");
  if (!types) return windows;
  if (static_cast<int64_t>(types->size()) != num_layers)
    fields.refuse(str("layer_types has ", types->size(), " entries for ", num_layers, " layers"));
  const bool may_choose = family.window == Window::kUpperLayers;
  for (int64_t l = 0; l < num_layers; ++l) {
    const std::string& type = (*types)[l];
    const bool slides = type == "sliding_attention";
    if (!slides && type != "full_attention" && type != "attention")
      fields.refuse(str("layer_types: '", printable(type),
                        "' is not supported; supported are full_attention and "
                        "sliding_attention"));
    if (may_choose) windows[l] = slides && use.value_or(false) ? window : 0;
    if (slides != (windows[l] != 0))
      fields.refuse(str("layer_types: layer ", l, " is ", type, ", but sliding_window and use_sliding_window make it ",
                        windows[l] != 0 ? "sliding_attention" : "full_attention"));
  }
  return windows;
}

// ---- rope --------------------------------------------------------------------------------------------------------

struct RopeKind {
  const char* name;
  RopeType type;
  std::vector<std::string_view> keys;  // beside those that every kind may have
};

const std::vector<RopeKind>& rope_kinds() {
  static const std::vector<RopeKind> kinds = {
      {"default", RopeType::kDefault, {}},
      {"linear", RopeType::kLinear, {}},
      {"dynamic", RopeType::kDynamic, {}},
      {"llama3", RopeType::kLlama3, {"low_freq_factor", "high_freq_factor"}},
      {"yarn", RopeType::kYarn, {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}},
  };
  return kinds;
}

const RopeKind& find_rope_kind(const Fields& rope) {
  const auto type = rope.text("rope_type");
  const auto legacy = rope.text("type");
  if (type && legacy && *type != *legacy)
    rope.refuse(str(rope.name("rope_type"), " is '", printable(*type), "', but ", rope.name("type"), " is '",
                    printable(*legacy), "': keep one"));
  const std::string wanted = type ? *type : legacy.value_or("default");
  std::string names;
  for (const RopeKind& kind : rope_kinds()) {
    if (wanted == kind.name) return kind;
    names += (names.empty() ? "" : ", ") + std::string(kind.name);
  }
  rope.refuse(str(rope.name(type ? "rope_type" : "type"), " '", printable(wanted), "' is not supported; supported are ",
                  names));
}

// A key that is given but does not fit the kind would be ignored, and the model would not be the one that was meant.
void check_rope_keys(const Fields& rope, const RopeKind& kind) {
  static constexpr std::array<std::string_view, 7> kCommon = {
      "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor",
      "finetuned"};
  for (const auto& [key, value] : rope.object().items()) {
    if (value.is_null() || std::find(kCommon.begin(), kCommon.end(), key) != kCommon.end()) continue;
    if (value.is_object()) rope.refuse(str(rope.name(key), ": a rope for each layer type is not supported"));
    if (std::find(kind.keys.begin(), kind.keys.end(), key) == kind.keys.end())
      rope.refuse(str(rope.name(key), " has no meaning for rope_type '", kind.name, "'"));
  }
  if (rope.number("partial_rotary_factor", 0, 1).value_or(1) != 1)
    rope.refuse(str(rope.name("partial_rotary_factor"), " other than 1 is not supported"));
}

// How much YaRN sharpens attention when the file does not say (the paper's fit; DeepSeek's mscale generalises it).
double yarn_attention_factor(const Fields& rope, double factor) {
  if (const auto given = rope.number("attention_factor", 0, 1e3)) return *given;
  const auto mscale = [&](double weight) { return factor <= 1 ? 1.0 : 0.1 * weight * std::log(factor) + 1.0; };
  const double of_query = rope.number("mscale", 0, 1e3, true).value_or(0);
  const double of_all = rope.number("mscale_all_dim", 0, 1e3, true).value_or(0);
  return of_query != 0 && of_all != 0 ? mscale(of_query) / mscale(of_all) : mscale(1);
}

// The number both spellings agree on, or the one that is given.
template <typename T>
std::optional<T> agree(const Fields& fields, const std::string& name, std::optional<T> a, const std::string& other_name,
                       std::optional<T> b) {
  if (a && b && *a != *b)
    fields.refuse(str(name, " is ", *a, ", but ", other_name, " is ", *b, ": which one is meant?"));
  return a ? a : b;
}

RopeConfig read_rope(const Fields& fields, const Family& family, int64_t head_dim, int64_t max_position) {
  constexpr double kMaxTheta = 1e15, kMaxFactor = 1e6;
  const json* scaling = fields.object_field("rope_scaling");        // transformers 4
  const json* parameters = fields.object_field("rope_parameters");  // transformers 5
  if (scaling != nullptr && parameters != nullptr && *scaling != *parameters)
    fields.refuse("has both rope_scaling and rope_parameters, and they differ: keep one");
  const json nothing = json::object();
  const Fields rope = fields.inner(scaling != nullptr      ? *scaling
                                   : parameters != nullptr ? *parameters
                                                           : nothing,
                                   scaling != nullptr ? "rope_scaling." : "rope_parameters.");
  const RopeKind& kind = find_rope_kind(rope);
  check_rope_keys(rope, kind);

  RopeConfig c;
  c.type = kind.type;
  c.theta = agree(fields, rope.name("rope_theta"), rope.number("rope_theta", 1, kMaxTheta), "rope_theta",
                  fields.number("rope_theta", 1, kMaxTheta))
                .value_or(family.rope_theta);
  const auto factor = rope.number("factor", 1, kMaxFactor, true);
  const auto original =
      agree(fields, rope.name("original_max_position_embeddings"),
            rope.integer("original_max_position_embeddings", 1, kMaxInt32), "original_max_position_embeddings",
            fields.integer("original_max_position_embeddings", 1, kMaxInt32));
  if (c.type == RopeType::kDefault) {
    if (factor.value_or(1) != 1) rope.refuse(str(rope.name("factor"), " has no meaning for rope_type 'default'"));
    return c;
  }
  c.original_max_position = original.value_or(max_position);
  if (factor) {
    c.factor = *factor;
  } else if (c.type == RopeType::kYarn && original && max_position > *original) {
    c.factor = static_cast<double>(max_position) / static_cast<double>(*original);
  } else {
    rope.refuse(str(rope.name("factor"), " is missing"));
  }

  if (c.type == RopeType::kDynamic) {
    // transformers scales from max_position_embeddings and never looks at the other number.
    if (c.original_max_position != max_position)
      fields.refuse(str("rope_type 'dynamic' starts at max_position_embeddings (", max_position,
                        "), but original_max_position_embeddings is ", c.original_max_position,
                        ": set the first to the length the model was trained for, and drop the second"));
    if (head_dim <= 2) fields.refuse("rope_type 'dynamic' needs head_dim above 2");
  } else if (c.type == RopeType::kLlama3) {
    const auto low = rope.number("low_freq_factor", 0, kMaxFactor),
               high = rope.number("high_freq_factor", 0, kMaxFactor);
    if (!low || !high) rope.refuse(str(rope.name(low ? "high_freq_factor" : "low_freq_factor"), " is missing"));
    if (*low >= *high)
      rope.refuse(str(rope.name("high_freq_factor"), " (", *high, ") must be above low_freq_factor (", *low, ")"));
    c.low_freq_factor = *low;
    c.high_freq_factor = *high;
  } else if (c.type == RopeType::kYarn) {
    c.attention_factor = yarn_attention_factor(rope, c.factor);
    c.beta_fast = rope.number("beta_fast", 0, kMaxFactor).value_or(c.beta_fast);
    c.beta_slow = rope.number("beta_slow", 0, kMaxFactor).value_or(c.beta_slow);
    c.truncate = rope.boolean("truncate").value_or(c.truncate);
    if (c.beta_fast < c.beta_slow)
      rope.refuse(str(rope.name("beta_fast"), " (", c.beta_fast, ") must not be below beta_slow (", c.beta_slow, ")"));
  }
  return c;
}

}  // namespace

ModelConfig parse_config(const std::string& json_text, const std::string& source) {
  const json root = parse_json_object(json_text, source);
  const Fields fields(root, source, "");
  const Family& family = find_family(fields);
  refuse_unknown_features(fields, family);

  ModelConfig c;
  c.model_type = family.model_type;
  c.hidden_size = fields.required_integer("hidden_size", kMaxWidth);
  c.intermediate_size = fields.required_integer("intermediate_size", kMaxWidth);
  c.num_layers = fields.required_integer("num_hidden_layers", 4096);
  c.num_heads = fields.required_integer("num_attention_heads", 65536);
  c.vocab_size = fields.required_integer("vocab_size", kMaxInt32);
  c.max_position_embeddings =
      fields.integer("max_position_embeddings", 1, kMaxInt32).value_or(family.max_position_embeddings);

  const bool kv_heads_absent = !fields.has_key("num_key_value_heads") && family.num_kv_heads != 0;
  c.num_kv_heads = fields.integer("num_key_value_heads", 1, c.num_heads)
                       .value_or(kv_heads_absent ? family.num_kv_heads : c.num_heads);
  if (c.num_heads % c.num_kv_heads != 0)
    fields.refuse(str("num_attention_heads (", c.num_heads, ") must be a multiple of num_key_value_heads (",
                      c.num_kv_heads, kv_heads_absent ? ", the family's default, as the field is missing)" : ")"));

  const bool head_dim_absent = !fields.has_key("head_dim") && family.head_dim != 0;
  const auto head_dim = fields.integer("head_dim", 1, 65536);
  if (!head_dim && !head_dim_absent && c.hidden_size % c.num_heads != 0)
    fields.refuse(str("hidden_size (", c.hidden_size, ") must be a multiple of num_attention_heads (", c.num_heads,
                      ") when head_dim is not given"));
  c.head_dim = head_dim ? *head_dim : head_dim_absent ? family.head_dim : c.hidden_size / c.num_heads;
  if (c.head_dim % 2 != 0) fields.refuse(str("head_dim (", c.head_dim, ") must be even: rope rotates pairs"));
  if (c.num_heads * c.head_dim > kMaxWidth)
    fields.refuse(str("num_attention_heads (", c.num_heads, ") x head_dim (", c.head_dim, ") is above ", kMaxWidth));

  c.rms_norm_eps = static_cast<float>(fields.number("rms_norm_eps", 1e-30, 1, true).value_or(family.rms_norm_eps));
  c.activation = read_activation(fields);
  c.rope = read_rope(fields, family, c.head_dim, c.max_position_embeddings);
  c.tie_word_embeddings = fields.boolean("tie_word_embeddings").value_or(family.tie_word_embeddings);
  const bool wants_bias = fields.boolean("attention_bias").value_or(false);
  c.o_bias = family.attention_bias == AttentionBias::kByConfig && wants_bias;
  c.qkv_bias = family.attention_bias == AttentionBias::kQkvAlways || c.o_bias;
  c.mlp_bias = fields.boolean("mlp_bias").value_or(false);
  c.qk_norm = family.qk_norm;
  c.sliding_window = read_windows(fields, family, c.num_layers);
  return c;
}

std::vector<std::string> supported_model_types() {
  std::vector<std::string> names;
  for (const Family& family : kFamilies) names.emplace_back(family.model_type);
  return names;
}

}  // namespace tiny_vllm
