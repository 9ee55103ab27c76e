#include "model/weights.h"

#include <algorithm>
#include <unordered_set>

#include "model/safetensors.h"

namespace tiny_vllm {
namespace {

constexpr int64_t kAlignment = 64;             // bytes: a cache line, and the widest vector register
constexpr int64_t kStagingElements = 1 << 20;  // converted at a time: 2-4 MB, small enough to stay in cache

// One tensor of the checkpoint: (rows, cols), or (rows) when cols is 0.
struct Part {
  std::string name;
  int64_t rows = 0;
  int64_t cols = 0;

  int64_t numel() const { return rows * std::max<int64_t>(cols, 1); }
  std::vector<int64_t> shape() const { return cols == 0 ? std::vector{rows} : std::vector{rows, cols}; }
};

// One tensor of ours: some parts of the checkpoint, stacked by rows.
struct Slot {
  Tensor* target;
  std::vector<Part> parts;
};

// The whole map from a Hugging Face checkpoint to our weights. Loading, checking and random weights all follow it.
std::vector<Slot> weight_table(const ModelConfig& c, Weights& w) {
  const int64_t D = c.hidden_size, F = c.intermediate_size, V = c.vocab_size, Dh = c.head_dim;
  const int64_t q_rows = c.num_heads * Dh, kv_rows = c.num_kv_heads * Dh;

  std::vector<Slot> table;
  table.push_back({&w.embedding, {{"model.embed_tokens.weight", V, D}}});
  w.layers.resize(c.num_layers);
  for (int64_t l = 0; l < c.num_layers; ++l) {
    LayerWeights& layer = w.layers[l];
    const std::string p = "model.layers." + std::to_string(l) + ".";
    const std::string attn = p + "self_attn.", mlp = p + "mlp.";

    table.push_back({&layer.attn_norm, {{p + "input_layernorm.weight", D}}});
    table.push_back({&layer.qkv,
                     {{attn + "q_proj.weight", q_rows, D},
                      {attn + "k_proj.weight", kv_rows, D},
                      {attn + "v_proj.weight", kv_rows, D}}});
    if (c.qkv_bias)
      table.push_back(
          {&layer.qkv_bias,
           {{attn + "q_proj.bias", q_rows}, {attn + "k_proj.bias", kv_rows}, {attn + "v_proj.bias", kv_rows}}});
    if (c.qk_norm) {
      table.push_back({&layer.q_norm, {{attn + "q_norm.weight", Dh}}});
      table.push_back({&layer.k_norm, {{attn + "k_norm.weight", Dh}}});
    }
    table.push_back({&layer.o, {{attn + "o_proj.weight", D, q_rows}}});
    if (c.o_bias) table.push_back({&layer.o_bias, {{attn + "o_proj.bias", D}}});
    table.push_back({&layer.mlp_norm, {{p + "post_attention_layernorm.weight", D}}});
    table.push_back({&layer.gate_up, {{mlp + "gate_proj.weight", F, D}, {mlp + "up_proj.weight", F, D}}});
    if (c.mlp_bias) table.push_back({&layer.gate_up_bias, {{mlp + "gate_proj.bias", F}, {mlp + "up_proj.bias", F}}});
    table.push_back({&layer.down, {{mlp + "down_proj.weight", D, F}}});
    if (c.mlp_bias) table.push_back({&layer.down_bias, {{mlp + "down_proj.bias", D}}});
  }
  table.push_back({&w.final_norm, {{"model.norm.weight", D}}});
  if (!c.tie_word_embeddings) table.push_back({&w.lm_head, {{"lm_head.weight", V, D}}});
  return table;
}

// Gives every slot its place in one allocation.
void place(std::vector<Slot>& table, DType dtype, Backend& backend, Weights& w) {
  std::vector<int64_t> offsets;
  int64_t bytes = 0;
  for (const Slot& slot : table) {
    offsets.push_back(bytes);
    int64_t numel = 0;
    for (const Part& part : slot.parts) numel += part.numel();
    w.num_parameters += numel;
    bytes += (numel * size_of(dtype) + kAlignment - 1) / kAlignment * kAlignment;
  }
  w.memory = backend.allocate(bytes);
  w.bytes = bytes;
  for (size_t i = 0; i < table.size(); ++i) {
    int64_t rows = 0;
    for (const Part& part : table[i].parts) rows += part.rows;
    char* data = static_cast<char*>(w.memory.get()) + offsets[i];
    const int64_t cols = table[i].parts[0].cols;
    *table[i].target = cols == 0 ? Tensor(data, dtype, {rows}) : Tensor(data, dtype, {rows, cols});
  }
}

std::string shape_string(const std::vector<int64_t>& shape) {
  std::string s = "(";
  for (size_t i = 0; i < shape.size(); ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + ")";
}

std::string list_names(const std::vector<std::string>& names, size_t most = 8) {
  std::string s;
  for (size_t i = 0; i < std::min(names.size(), most); ++i) s += (i ? ", " : "") + names[i];
  return names.size() > most ? str(s, " and ", names.size() - most, " more") : s;
}

// Everything that can be wrong is found here, before the first byte of a tensor is read.
void check_against(const Checkpoint& checkpoint, const std::vector<Slot>& table, bool tied, Weights& w) {
  std::unordered_set<std::string> known;
  std::vector<std::string> missing;
  for (const Slot& slot : table) {
    for (const Part& part : slot.parts) {
      known.insert(part.name);
      const TensorEntry* entry = checkpoint.find(part.name);
      if (entry == nullptr) {
        missing.push_back(part.name);
      } else if (entry->shape != part.shape()) {
        throw ModelLoadError(str(entry->file, ": tensor ", part.name, " has shape ", shape_string(entry->shape),
                                 ", but config.json asks for ", shape_string(part.shape())));
      } else if (!entry->supported) {
        throw ModelLoadError(str(entry->file, ": tensor ", part.name, " has dtype ", entry->dtype_name,
                                 "; supported are BF16, F16 and F32"));
      }
    }
  }
  if (!missing.empty())
    throw ModelLoadError(
        str(checkpoint.folder(), ": missing tensor", missing.size() > 1 ? "s " : " ", list_names(missing)));

  std::vector<std::string> unused;
  for (const std::string& name : checkpoint.names()) {
    if (known.count(name) != 0) continue;
    if (tied && name == "lm_head.weight")
      w.notes.push_back(
          str(checkpoint.folder(),
              ": lm_head.weight is in the file, but config.json ties it to the embedding, which is used"));
    else
      unused.push_back(name);
  }
  if (!unused.empty()) w.notes.push_back(str(checkpoint.folder(), ": not used: ", list_names(unused)));
}

// splitmix64 (Steele, Lea, Flood 2014): the i-th number of a stream without the ones before it.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

Weights load_weights(const ModelConfig& config, const Checkpoint& checkpoint, DType dtype, Backend& backend,
                     const LoadProgress& progress) {
  Weights w;
  std::vector<Slot> table = weight_table(config, w);
  w.notes = checkpoint.notes();
  check_against(checkpoint, table, config.tie_word_embeddings, w);
  place(table, dtype, backend, w);

  std::vector<char> staging(kStagingElements * size_of(dtype));
  int64_t done = 0;
  for (const Slot& slot : table) {
    char* target = static_cast<char*>(slot.target->data);
    for (const Part& part : slot.parts) {
      const TensorEntry& entry = *checkpoint.find(part.name);
      for (int64_t i = 0; i < part.numel(); i += kStagingElements) {
        const int64_t count = std::min(kStagingElements, part.numel() - i);
        if (entry.dtype == dtype) {
          backend.upload(target, entry.data + i * size_of(dtype), count * size_of(dtype));
        } else {
          convert_to(entry, i, count, dtype, staging.data());
          backend.upload(target, staging.data(), count * size_of(dtype));
        }
        target += count * size_of(dtype);
        done += count * size_of(dtype);
        if (progress) progress(done, w.num_parameters * size_of(dtype));
      }
    }
  }
  if (config.tie_word_embeddings) w.lm_head = w.embedding;
  return w;
}

Weights dummy_weights(const ModelConfig& config, DType dtype, uint64_t seed, Backend& backend,
                      const LoadProgress& progress) {
  Weights w;
  std::vector<Slot> table = weight_table(config, w);
  place(table, dtype, backend, w);

  const float half_width = 0.02f * std::sqrt(3.0f);  // a uniform number in [-a, a] has standard deviation a/sqrt(3)
  std::vector<char> staging(kStagingElements * size_of(dtype));
  uint64_t counter = mix(seed);
  int64_t done = 0;
  for (const Slot& slot : table) {
    const Tensor& t = *slot.target;
    const bool is_norm = slot.parts[0].name.find("norm") != std::string::npos;
    for (int64_t i = 0; i < t.numel(); i += kStagingElements) {
      const int64_t count = std::min(kStagingElements, t.numel() - i);
      for (int64_t j = 0; j < count; ++j) {
        const float unit = static_cast<float>(mix(counter++) >> 40) * 0x1p-24f;  // [0, 1)
        const float x = is_norm ? 1.0f : (2.0f * unit - 1.0f) * half_width;
        if (dtype == DType::kFloat32)
          reinterpret_cast<float*>(staging.data())[j] = x;
        else
          reinterpret_cast<bfloat16*>(staging.data())[j] = to_bfloat16(x);
      }
      backend.upload(static_cast<char*>(t.data) + i * size_of(dtype), staging.data(), count * size_of(dtype));
      done += count * size_of(dtype);
      if (progress) progress(done, w.num_parameters * size_of(dtype));
    }
  }
  if (config.tie_word_embeddings) w.lm_head = w.embedding;
  return w;
}

}  // namespace tiny_vllm
