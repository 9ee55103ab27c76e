// Each op of backend.h on numpy arrays, for tiny_vllm.ops: tests, chapters and curious people call one idea alone.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>

#include "bindings/bindings.h"
#include "cpu/cpu_backend.h"
#include "cpu/kernels.h"
#include "sample/sampler.h"

namespace py = pybind11;

namespace tiny_vllm {
namespace {

using Ids = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using Slots = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

// A tensor on a backend's device, which lives as long as somebody holds it.
struct DeviceArray {
  std::shared_ptr<Backend> backend;
  Buffer buffer;
  Tensor tensor;

  std::vector<int64_t> shape() const { return {tensor.shape.begin(), tensor.shape.begin() + tensor.ndim}; }

  // Part of it, from element `first` on, in another shape.
  DeviceArray view(int64_t first, const std::vector<int64_t>& new_shape) const {
    if (new_shape.size() > Tensor::kMaxDims) throw InvalidRequestError(str(new_shape.size(), " dimensions; at most 5"));
    DeviceArray a{backend, buffer, tensor};
    a.tensor.ndim = 0;
    for (int64_t d : new_shape) a.tensor.shape[a.tensor.ndim++] = d;
    if (first < 0 || a.tensor.numel() < 0 || first + a.tensor.numel() > tensor.numel()) {
      throw InvalidRequestError(
          str(a.tensor.shape_string(), " from element ", first, " on does not lie within ", tensor.shape_string()));
    }
    a.tensor.data = static_cast<char*>(tensor.data) + first * size_of(tensor.dtype);
    return a;
  }

  // bfloat16 has no number type in numpy: its bits come and go as uint16, and ops.py gives them their meaning.
  py::array numpy() const {
    const py::dtype type = tensor.dtype == DType::kFloat32 ? py::dtype::of<float>() : py::dtype::of<uint16_t>();
    py::array result(type, shape());
    void* data = result.mutable_data();
    py::gil_scoped_release release;
    backend->synchronize();
    backend->download(data, tensor.data, tensor.nbytes());
    return result;
  }
};

Tensor tensor_or_none(const std::optional<DeviceArray>& array) { return array ? array->tensor : Tensor(); }

Activation activation_named(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  throw InvalidRequestError(str("activation is '", name, "'; it must be silu, gelu or gelu_tanh"));
}

template <typename T>
std::vector<T> to_vector(const py::array_t<T, py::array::c_style | py::array::forcecast>& array) {
  return {array.data(), array.data() + array.size()};
}

// What rope_and_cache() and paged_attention() read of a StepBatch; the rest is left at 0.
struct Batch {
  StepBatch step;
  AttentionShape shape;

  Batch(const Ids& query_start, const Ids& context_len, const Ids& block_tables, const Slots& slot_mapping,
        const Floats& cos_sin, const AttentionShape& attention_shape)
      : shape(attention_shape) {
    if (shape.num_heads < 1 || shape.num_kv_heads < 1 || shape.head_dim < 1 || shape.block_size < 1) {
      throw InvalidRequestError("num_heads, num_kv_heads, head_dim and block_size must be 1 or more");
    }
    for (int64_t r = 0; r < context_len.size(); ++r) {
      if (context_len.data()[r] < 0) throw InvalidRequestError(str("context_len[", r, "] is ", context_len.data()[r]));
    }
    step.query_start = to_vector(query_start);
    step.context_len = to_vector(context_len);
    step.block_tables = to_vector(block_tables);
    step.block_table_width = block_tables.ndim() == 2 ? block_tables.shape(1) : 0;
    step.slot_mapping = to_vector(slot_mapping);
    step.cos_sin = to_vector(cos_sin);
    step.token_ids.assign(step.slot_mapping.size(), 0);
    step.positions.assign(step.slot_mapping.size(), 0);
    for (int64_t r = 0; r < step.num_requests() && r + 1 < static_cast<int64_t>(step.query_start.size()); ++r) {
      const int32_t first = step.query_start[r], end = step.query_start[r + 1];
      for (int32_t t = first; t < end && t < static_cast<int64_t>(step.positions.size()); ++t) {
        step.positions[t] = step.context_len[r] - end + t;
      }
    }
  }
};

class Ops {
 public:
  Ops(const std::string& device, int num_threads, const std::string& cpu_isa) {
    BackendOptions options;
    options.device = device;
    options.num_threads = num_threads;
    options.cpu_isa = cpu_isa;
    backend_ = make_backend(options);
  }

  std::string description() const { return backend_->description(); }

  DeviceArray empty(const std::vector<int64_t>& shape, const std::string& dtype) const {
    if (shape.size() > Tensor::kMaxDims) throw InvalidRequestError(str(shape.size(), " dimensions; at most 5"));
    DeviceArray a{backend_, nullptr, {}};
    if (dtype != "float32" && dtype != "bfloat16") {
      throw InvalidRequestError(str("dtype must be bfloat16 or float32, got '", dtype, "'"));
    }
    a.tensor.dtype = dtype == "float32" ? DType::kFloat32 : DType::kBFloat16;
    for (int64_t d : shape) {
      if (d < 0) throw InvalidRequestError(str("a dimension is ", d));
      a.tensor.shape[a.tensor.ndim++] = d;
    }
    a.buffer = backend_->allocate(a.tensor.nbytes());
    a.tensor.data = a.buffer.get();
    return a;
  }

  // float32 data, or uint16 data: the bits of bfloat16.
  DeviceArray array(const py::array& data) const {
    const bool is_float = py::isinstance<py::array_t<float>>(data);
    if (!is_float && !py::isinstance<py::array_t<uint16_t>>(data)) {
      throw InvalidRequestError("an array must be float32, or uint16 with the bits of bfloat16");
    }
    const py::array contiguous = py::array::ensure(data, py::array::c_style);
    DeviceArray a = empty({data.shape(), data.shape() + data.ndim()}, is_float ? "float32" : "bfloat16");
    backend_->upload(a.tensor.data, contiguous.data(), a.tensor.nbytes());
    return a;
  }

  // Row numbers of embedding() and gather_rows(), on the device.
  void gather(const DeviceArray& table, const Ids& rows, const DeviceArray& out) {
    for (int64_t i = 0; i < rows.size(); ++i) {
      const int32_t row = rows.data()[i];
      if (row < 0 || row >= table.tensor.shape[0]) {
        throw InvalidRequestError(str("row ", row, " of a table with ", table.tensor.shape[0], " rows"));
      }
    }
    const Buffer ids = backend_->allocate(rows.nbytes());
    backend_->upload(ids.get(), rows.data(), rows.nbytes());
    py::gil_scoped_release release;
    backend_->gather_rows(table.tensor, static_cast<const int32_t*>(ids.get()), out.tensor);
    backend_->synchronize();
  }

  Backend& backend() const { return *backend_; }

 private:
  std::shared_ptr<Backend> backend_;
};

void bind_ops_class(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Ops>(m, "Ops", "The ops of one device. See tiny_vllm.ops, which wraps it.")
      .def(py::init<const std::string&, int, const std::string&>(), py::arg("device") = "cpu",
           py::arg("num_threads") = 0, py::arg("cpu_isa") = "auto")
      .def_property_readonly("description", &Ops::description)
      .def("empty", &Ops::empty, py::arg("shape"), py::arg("dtype"))
      .def("array", &Ops::array, py::arg("data"))
      .def("gather_rows", &Ops::gather, py::arg("x"), py::arg("rows"), py::arg("out"))
      .def(
          "rms_norm",
          [](Ops& ops, const DeviceArray& x, const DeviceArray& weight, float eps, const DeviceArray& out) {
            ops.backend().rms_norm(x.tensor, weight.tensor, eps, out.tensor);
          },
          NoGil(), py::arg("x"), py::arg("weight"), py::arg("eps"), py::arg("out"))
      .def(
          "matmul",
          [](Ops& ops, const DeviceArray& x, const DeviceArray& weight, const std::optional<DeviceArray>& bias,
             const DeviceArray& out) {
            ops.backend().matmul(x.tensor, weight.tensor, tensor_or_none(bias), out.tensor);
          },
          NoGil(), py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("out"))
      .def(
          "matmul_add",
          [](Ops& ops, const DeviceArray& x, const DeviceArray& weight, const std::optional<DeviceArray>& bias,
             const DeviceArray& out) {
            ops.backend().matmul_add(x.tensor, weight.tensor, tensor_or_none(bias), out.tensor);
          },
          NoGil(), py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("out"))
      .def(
          "norm_matmul",
          [](Ops& ops, const DeviceArray& x, const DeviceArray& norm_weight, float eps, const DeviceArray& room,
             const DeviceArray& weight, const std::optional<DeviceArray>& bias, const DeviceArray& out) {
            ops.backend().norm_matmul({x.tensor, norm_weight.tensor, eps, room.tensor}, weight.tensor,
                                      tensor_or_none(bias), out.tensor);
          },
          NoGil(), py::arg("x"), py::arg("norm_weight"), py::arg("eps"), py::arg("room"), py::arg("weight"),
          py::arg("bias"), py::arg("out"))
      .def(
          "norm_matmul_act_mul",
          [](Ops& ops, const DeviceArray& x, const DeviceArray& norm_weight, float eps, const DeviceArray& room,
             const DeviceArray& weight, const std::optional<DeviceArray>& bias, const std::string& activation,
             const DeviceArray& gate_up, const DeviceArray& out) {
            ops.backend().norm_matmul_act_mul({x.tensor, norm_weight.tensor, eps, room.tensor}, weight.tensor,
                                              tensor_or_none(bias), activation_named(activation), gate_up.tensor,
                                              out.tensor);
          },
          NoGil(), py::arg("x"), py::arg("norm_weight"), py::arg("eps"), py::arg("room"), py::arg("weight"),
          py::arg("bias"), py::arg("activation"), py::arg("gate_up"), py::arg("out"))
      .def(
          "rope_and_cache",
          [](Ops& ops, const DeviceArray& qkv, const std::optional<DeviceArray>& q_norm,
             const std::optional<DeviceArray>& k_norm, float eps, const Batch& batch, const DeviceArray& keys,
             const DeviceArray& values) {
            Backend& b = ops.backend();
            b.rope_and_cache(qkv.tensor, tensor_or_none(q_norm), tensor_or_none(k_norm), eps, b.upload(batch.step),
                             batch.shape, {keys.tensor, values.tensor});
          },
          NoGil(), py::arg("qkv"), py::arg("q_norm"), py::arg("k_norm"), py::arg("eps"), py::arg("batch"),
          py::arg("keys"), py::arg("values"))
      .def(
          "paged_attention",
          [](Ops& ops, const DeviceArray& qkv, const Batch& batch, const DeviceArray& keys, const DeviceArray& values,
             const DeviceArray& out) {
            Backend& b = ops.backend();
            b.paged_attention(qkv.tensor, b.upload(batch.step), batch.shape, {keys.tensor, values.tensor}, out.tensor);
          },
          NoGil(), py::arg("qkv"), py::arg("batch"), py::arg("keys"), py::arg("values"), py::arg("out"))
      .def(
          "act_mul",
          [](Ops& ops, const DeviceArray& gate_up, const std::string& activation, const DeviceArray& out) {
            ops.backend().act_mul(gate_up.tensor, activation_named(activation), out.tensor);
          },
          NoGil(), py::arg("gate_up"), py::arg("activation"), py::arg("out"))
      .def(
          "copy_block",
          [](Ops& ops, const DeviceArray& keys, const DeviceArray& values, int32_t src, int32_t dst) {
            ops.backend().copy_block({keys.tensor, values.tensor}, src, dst);
          },
          NoGil(), py::arg("keys"), py::arg("values"), py::arg("src"), py::arg("dst"));
}

// n requests of one token without context, whose logits are wanted.
StepBatch empty_step(int64_t n) {
  StepBatch step;
  step.token_ids.assign(n, 0);
  step.positions.assign(n, 0);
  step.slot_mapping.assign(n, -1);
  step.context_len.assign(n, 0);
  for (int64_t i = 0; i <= n; ++i) step.query_start.push_back(static_cast<int32_t>(i));
  step.logits_rows.assign(step.query_start.begin(), step.query_start.end() - 1);
  return step;
}

std::vector<int32_t> sample(const Ops& ops, const DeviceArray& logits, const std::vector<SampleRow>& rows) {
  const int64_t n = std::ssize(rows), vocab_size = logits.tensor.shape[1];
  std::vector<SamplingParams> params(rows.size());
  for (int64_t i = 0; i < n; ++i) {
    params[i].temperature = rows[i].temperature;
    params[i].top_k = rows[i].top_k;
    params[i].top_p = rows[i].top_p;
    params[i].min_p = rows[i].min_p;
    params[i].validate(vocab_size);
  }
  Backend& backend = ops.backend();
  if (n == 0) return {};
  if (backend.can_sample()) {
    StepBatch step = empty_step(n);
    step.sampling = rows;
    backend.sample(logits.tensor, backend.upload(step), 0);
    const Sampled sampled = backend.receive(backend.send(n));
    return {sampled.tokens.begin(), sampled.tokens.end()};
  }
  std::vector<int32_t> tokens(rows.size(), -2);
  std::vector<float> values(n * vocab_size);
  backend.download(values.data(), logits.tensor.data, logits.tensor.nbytes());
  Sampler sampler;
  for (int64_t i = 0; i < n; ++i)
    tokens[i] = sampler.sample(std::span(values).subspan(i * vocab_size, vocab_size), params[i],
                               {rows[i].seed, rows[i].position});
  return tokens;
}

}  // namespace

void bind_ops(py::module_& m) {
  py::class_<DeviceArray>(m, "DeviceArray", "A tensor on a device.")
      .def_property_readonly("shape", &DeviceArray::shape)
      .def_property_readonly("dtype", [](const DeviceArray& a) { return name_of(a.tensor.dtype); })
      .def("view", &DeviceArray::view, py::arg("first"), py::arg("shape"), "A part of it in another shape, not copied.")
      .def("numpy", &DeviceArray::numpy, "A copy: float32, or uint16 with the bits of bfloat16.");

  py::class_<Batch>(m, "OpsBatch", "The part of a step's batch that rope_and_cache and paged_attention read.")
      .def(py::init([](const Ids& query_start, const Ids& context_len, const Ids& block_tables,
                       const Slots& slot_mapping, const Floats& cos_sin, int64_t num_heads, int64_t num_kv_heads,
                       int64_t head_dim, int64_t block_size, int64_t sliding_window, float scale) {
             return Batch(query_start, context_len, block_tables, slot_mapping, cos_sin,
                          {num_heads, num_kv_heads, head_dim, block_size, sliding_window, scale});
           }),
           py::kw_only(), py::arg("query_start"), py::arg("context_len"), py::arg("block_tables"),
           py::arg("slot_mapping"), py::arg("cos_sin"), py::arg("num_heads"), py::arg("num_kv_heads"),
           py::arg("head_dim"), py::arg("block_size"), py::arg("sliding_window") = 0, py::arg("scale") = 0.0f);

  bind_ops_class(m);
  py::class_<SampleRow>(m, "SampleRow", "How a row of logits becomes a token.")
      .def(py::init([](double temperature, int64_t top_k, double top_p, double min_p, uint64_t seed, int64_t position) {
             return SampleRow{temperature, top_k, top_p, min_p, seed, position};
           }),
           py::arg("temperature"), py::arg("top_k"), py::arg("top_p"), py::arg("min_p"), py::arg("seed"),
           py::arg("position"));
  m.def("sample", &sample, py::call_guard<py::gil_scoped_release>(), py::arg("ops"), py::arg("logits"), py::arg("rows"),
        "A token for each row of logits (n, V), chosen by the device if it can, by Sampler otherwise.");

  m.def("available_isas", &available_isas, "The CPU instruction sets that this machine and build can run, best first.");
  m.def("measure_read_bandwidth", &measure_read_bandwidth, py::call_guard<py::gil_scoped_release>(),
        py::arg("num_threads") = 0, py::arg("bytes") = int64_t{1} << 29,
        "GB/s that this many threads read memory with: the ceiling of decoding. 0: all CPUs of this process.");
}

}  // namespace tiny_vllm
