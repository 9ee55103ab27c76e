// Model folders for Python: config.json, safetensors files, rotary angles. What the engine itself needs of them stays
// in C++; these classes are for tests, `tiny-vllm info` and curious people.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "base/printable.h"
#include "bindings/bindings.h"
#include "model/config.h"
#include "model/rope.h"
#include "model/safetensors.h"

namespace py = pybind11;

namespace tiny_vllm {
namespace {

const TensorEntry& require(const TensorEntry* entry, const std::string& name, const std::string& where) {
  if (entry == nullptr) throw py::key_error(str(printable(where, 4096), ": no tensor '", printable(name), "'"));
  return *entry;
}

// A copy as float32, or as the bits of bfloat16 (uint16; numpy has no such type of its own).
py::array to_numpy(const TensorEntry& entry, const std::string& dtype) {
  if (!entry.supported)
    throw ModelLoadError(str(printable(entry.file, 4096), ": tensor '", printable(entry.name), "' has dtype ",
                             entry.dtype_name, "; supported are BF16, F16 and F32"));
  if (dtype == "float32") {
    py::array_t<float> out(entry.shape);
    convert_to(entry, DType::kFloat32, out.mutable_data());
    return out;
  }
  if (dtype == "bfloat16") {
    py::array_t<uint16_t> out(entry.shape);
    convert_to(entry, DType::kBFloat16, out.mutable_data());
    return out;
  }
  throw InvalidRequestError(str("dtype must be 'float32' or 'bfloat16', found '", printable(dtype), "'"));
}

// The methods that a file and a folder share: names(), tensor(), numpy(), bytes().
template <typename Source, typename Where>
void bind_tensors(py::class_<Source>& cls, Where where) {
  cls.def(
         "tensor",
         [where](const Source& s, const std::string& name) -> const TensorEntry& {
           return require(s.find(name), name, where(s));
         },
         py::arg("name"), py::return_value_policy::reference_internal, "The entry of a tensor. Raises KeyError.")
      .def(
          "numpy",
          [where](const Source& s, const std::string& name, const std::string& dtype) {
            return to_numpy(require(s.find(name), name, where(s)), dtype);
          },
          py::arg("name"), py::arg("dtype") = "float32",
          "A copy of a tensor: dtype 'float32', or 'bfloat16' as its bits in uint16. Raises KeyError, ModelLoadError.")
      .def(
          "bytes",
          [where](const Source& s, const std::string& name) {
            const TensorEntry* entry = s.find(name);
            require(entry, name, where(s));
            return py::bytes(reinterpret_cast<const char*>(entry->data), static_cast<size_t>(entry->nbytes));
          },
          py::arg("name"), "The bytes of a tensor as they are in the file. Raises KeyError.")
      .def("__contains__", [](const Source& s, const std::string& name) { return s.find(name) != nullptr; });
}

const char* name_of(RopeType type) {
  switch (type) {
    case RopeType::kDefault:
      return "default";
    case RopeType::kLinear:
      return "linear";
    case RopeType::kDynamic:
      return "dynamic";
    case RopeType::kLlama3:
      return "llama3";
    case RopeType::kYarn:
      return "yarn";
  }
  return "?";
}

const char* name_of(Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return "silu";
    case Activation::kGelu:
      return "gelu";
    case Activation::kGeluTanh:
      return "gelu_tanh";
  }
  return "?";
}

py::dict to_dict(const RopeConfig& c) {
  using namespace py::literals;
  return py::dict("type"_a = name_of(c.type), "theta"_a = c.theta, "factor"_a = c.factor,
                  "original_max_position"_a = c.original_max_position, "low_freq_factor"_a = c.low_freq_factor,
                  "high_freq_factor"_a = c.high_freq_factor, "attention_factor"_a = c.attention_factor,
                  "beta_fast"_a = c.beta_fast, "beta_slow"_a = c.beta_slow, "truncate"_a = c.truncate);
}

py::dict to_dict(const ModelConfig& c) {
  using namespace py::literals;
  return py::dict("model_type"_a = c.model_type, "hidden_size"_a = c.hidden_size,
                  "intermediate_size"_a = c.intermediate_size, "num_layers"_a = c.num_layers,
                  "num_heads"_a = c.num_heads, "num_kv_heads"_a = c.num_kv_heads, "head_dim"_a = c.head_dim,
                  "vocab_size"_a = c.vocab_size, "max_position_embeddings"_a = c.max_position_embeddings,
                  "rms_norm_eps"_a = c.rms_norm_eps, "activation"_a = name_of(c.activation), "rope"_a = to_dict(c.rope),
                  "tie_word_embeddings"_a = c.tie_word_embeddings, "qkv_bias"_a = c.qkv_bias, "o_bias"_a = c.o_bias,
                  "mlp_bias"_a = c.mlp_bias, "qk_norm"_a = c.qk_norm, "sliding_window"_a = c.sliding_window);
}

}  // namespace

void bind_safetensors(py::module_& m) {
  py::class_<TensorEntry>(m, "TensorEntry", "What a checkpoint says of one tensor.")
      .def_readonly("name", &TensorEntry::name)
      .def_readonly("dtype", &TensorEntry::dtype_name)
      .def_readonly("supported", &TensorEntry::supported)
      .def_readonly("nbytes", &TensorEntry::nbytes)
      .def_property_readonly("shape", [](const TensorEntry& e) { return py::tuple(py::cast(e.shape)); })
      .def_property_readonly("file", [](const TensorEntry& e) { return printable(e.file, 4096); });

  py::class_<SafetensorsFile> file(m, "SafetensorsFile", "One safetensors file, checked and mapped.");
  file.def(py::init(&SafetensorsFile::open), py::arg("path"), py::call_guard<py::gil_scoped_release>(),
           "Raises ModelLoadError naming the file, and the tensor where there is one.")
      .def_property_readonly("names", [](const SafetensorsFile& f) {
        std::vector<std::string> names;
        for (const TensorEntry& entry : f.tensors()) names.push_back(entry.name);
        return names;
      });
  bind_tensors(file, [](const SafetensorsFile& f) { return f.path(); });

  py::class_<Checkpoint> checkpoint(m, "Checkpoint",
                                    "The weights of a model folder: one file, or shards and an index.");
  checkpoint
      .def(py::init(&Checkpoint::open), py::arg("folder"), py::call_guard<py::gil_scoped_release>(),
           "Raises ModelLoadError naming the file, and the tensor where there is one.")
      .def_property_readonly("names", &Checkpoint::names)
      .def_property_readonly("nbytes", &Checkpoint::nbytes)
      .def_property_readonly("notes", &Checkpoint::notes)
      .def_property_readonly("files", [](const Checkpoint& c) {
        std::vector<std::string> files;
        for (const SafetensorsFile& f : c.files()) files.push_back(printable(f.path(), 4096));
        return files;
      });
  bind_tensors(checkpoint, [](const Checkpoint& c) { return c.folder(); });

  py::class_<ModelConfig>(m, "ModelConfig", "config.json, checked: what the forward pass needs to know about a model.")
      .def_readonly("model_type", &ModelConfig::model_type)
      .def_readonly("hidden_size", &ModelConfig::hidden_size)
      .def_readonly("intermediate_size", &ModelConfig::intermediate_size)
      .def_readonly("num_layers", &ModelConfig::num_layers)
      .def_readonly("num_heads", &ModelConfig::num_heads)
      .def_readonly("num_kv_heads", &ModelConfig::num_kv_heads)
      .def_readonly("head_dim", &ModelConfig::head_dim)
      .def_readonly("vocab_size", &ModelConfig::vocab_size)
      .def_readonly("max_position_embeddings", &ModelConfig::max_position_embeddings)
      .def(
          "as_dict", [](const ModelConfig& c) { return to_dict(c); }, "Every field, by name.")
      .def("__getitem__",
           [](const ModelConfig& c, const py::str& key) {
             const py::dict fields = to_dict(c);
             if (!fields.contains(key)) throw py::key_error(std::string(key));
             return py::object(fields[key]);
           })
      .def("__repr__", [](const ModelConfig& c) { return "ModelConfig(" + std::string(py::repr(to_dict(c))) + ")"; });
  m.def("parse_config", &parse_config, py::arg("json_text"), py::arg("source") = "config.json",
        "Parses and checks the text of a config.json; source names it in messages. Raises ModelLoadError.");
  m.def("supported_model_types", &supported_model_types, "The values of model_type that parse_config accepts.");

  py::class_<Rope>(m, "Rope", "Rotary angles of a model. Frequencies are in radians a token.")
      .def(py::init([](const ModelConfig& c) { return Rope(c.rope, c.head_dim, c.max_position_embeddings); }),
           py::arg("config"))
      .def_property_readonly("depends_on_length", &Rope::depends_on_length)
      .def_property_readonly("attention_scaling", &Rope::attention_scaling)
      .def(
          "inv_freq",
          [](const Rope& rope, int64_t sequence_length) {
            const std::vector<float>& f = rope.inv_freq(sequence_length);
            return py::array_t<float>(static_cast<py::ssize_t>(f.size()), f.data());
          },
          py::arg("sequence_length") = 0, "(Dh/2) frequencies; the length matters to dynamic scaling only.")
      .def(
          "cos_sin",
          [](const Rope& rope, int32_t position, int64_t sequence_length) {
            const auto pairs = static_cast<py::ssize_t>(rope.inv_freq(sequence_length).size());
            if (position < 0) throw InvalidRequestError(str("position must be 0 or more, found ", position));
            py::array_t<float> out({pairs, py::ssize_t{2}});
            rope.cos_sin(position, sequence_length, out.mutable_data());
            return out;
          },
          py::arg("position"), py::arg("sequence_length") = 0, "(Dh/2, 2): cos and sin of each pair at a position.");
}

}  // namespace tiny_vllm
