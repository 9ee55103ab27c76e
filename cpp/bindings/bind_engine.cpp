// The engine, its options and what a step reports.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "bindings/bindings.h"
#include "engine/engine.h"

namespace py = pybind11;

namespace tiny_vllm {
namespace {

const char* name_of(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return nullptr;
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kAbort:
      return "abort";
    case FinishReason::kError:
      return "error";
  }
  return nullptr;
}

DType dtype_named(const std::string& name) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat32})
    if (name == name_of(dtype)) return dtype;
  throw InvalidRequestError(str("dtype must be bfloat16 or float32, got '", name, "'"));
}

std::unique_ptr<Engine> make_engine(const std::string& config_json, const std::string& source,
                                    const std::string& folder, const EngineOptions& options,
                                    const py::object& progress) {
  const LoadProgress report = [&progress](int64_t done, int64_t total) {
    py::gil_scoped_acquire gil;  // loading runs without the lock; only this call takes it
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!progress.is_none()) progress(done, total);
  };
  py::gil_scoped_release release;
  return std::make_unique<Engine>(config_json, source, folder, options, make_backend(options.backend), report);
}

// ---- requests as Python keeps them ----
//
// Python's Engine has one object a request, with these attributes:
//   request_id  str
//   received    list of what the steps said: StepOutput; or just the token, an int, where it is the first sequence's
//               next one and there is no more to say; an aborted request's last element is the time, a float.
//               Of a watched request each is a StepOutput, because any may turn out to be the last and needs its time
//   finished    bool: nothing more will come
//   owner       None when step() reports the request
//   reported    the number of elements of `received` that the last report of step() was made of
//   is_watched  bool: Python looks at it after each step. It has stop strings, which only Python finds, and then ends
//               the sequence by stop_sequence(); or it is guided, and Python says before each token which ones may
//               come, by allow_tokens()
// and four containers of them:
//   requests    {id: request}: all that are not finished
//   watched     {id: request}: those of them that are watched
//   moved       {id: request}: those without owner that step() has to report
//   ready       list of RequestOutput: reports that step() made and has not returned yet
//
// Each function below changes them together with the core, in one call. Python looks at signals between its own
// instructions only, so Ctrl-C never finds the two apart. For the same reason nothing of Python's runs in here between
// a change of the core and that of the containers: it could raise.

// A step output with the moment it came.
struct TimedOutput : StepOutput {
  double time = 0;
};

// That a token came is all there is to say: its StepOutput would cost more than all else that Python does for it. The
// first one also says when.
bool is_just_a_token(const StepOutput& output, const py::list& received) {
  return output.index == 0 && output.token >= 0 && output.finish_reason == FinishReason::kNone &&
         output.logprobs.empty() && output.prompt_logprobs.empty() && received.size() > 0;
}

bool is_of(const py::handle output, const py::str& id) { return id.equal(py::object(output.attr("request_id"))); }

bool contains(const py::list& ready, const py::str& id) {
  return std::any_of(ready.begin(), ready.end(), [&](const py::handle output) { return is_of(output, id); });
}

void erase(const py::dict& requests, const py::str& id) {
  if (requests.contains(id) && PyDict_DelItem(requests.ptr(), id.ptr()) != 0) throw py::error_already_set();
}

void end(const py::dict& requests, const py::dict& watched, const py::str& id) {
  requests[id].attr("finished") = true;
  erase(requests, id);
  erase(watched, id);
}

// A set of tokens as Python has it: a bit each, in words of 32 bits, the lowest first.
std::vector<uint32_t> bits_of(const py::bytes& allowed) {
  const std::string_view bytes = allowed;
  TV_CHECK(bytes.size() % sizeof(uint32_t) == 0, "a set of tokens has ", bytes.size(), " bytes");
  std::vector<uint32_t> bits(bytes.size() / sizeof(uint32_t));
  std::memcpy(bits.data(), bytes.data(), bytes.size());
  return bits;
}

void add_request(Engine& engine, const py::dict& requests, const py::dict& watched, const py::dict& moved,
                 const py::list& ready, const py::object& request, std::vector<int32_t> prompt,
                 const SamplingParams& params, int64_t priority, const py::bytes& allowed) {
  const py::str id = request.attr("request_id");
  if (moved.contains(id) || contains(ready, id))
    throw InvalidRequestError(str("request_id '", std::string(id), "' is in use: step() has not reported its end yet"));
  const bool is_watched = request.attr("is_watched").cast<bool>();
  engine.add_request(id, std::move(prompt), params, priority, bits_of(allowed));
  requests[id] = request;
  if (is_watched) watched[id] = request;
}

bool abort_request(Engine& engine, const py::dict& requests, const py::dict& watched, const py::dict& moved,
                   const py::list& ready, const py::str& id) {
  const bool found = engine.abort_request(id);
  if (requests.contains(id)) {
    requests[id].attr("received").cast<py::list>().append(steady_seconds());
    end(requests, watched, id);
  }
  erase(moved, id);
  for (py::size_t i = ready.size(); i-- > 0;)
    if (is_of(ready[i], id) && PySequence_DelItem(ready.ptr(), static_cast<py::ssize_t>(i)) != 0)
      throw py::error_already_set();
  return found;
}

// For a sequence whose received tokens contain a stop string: `received` says all about it already. Since the caller
// looked, a signal handler may have ended the request and given its id to another one, which is left alone then.
bool stop_sequence(Engine& engine, const py::dict& requests, const py::dict& watched, const py::object& request,
                   int64_t index, bool failed) {
  const py::str id = request.attr("request_id");
  if (!requests.contains(id) || !request.is(requests[id])) return false;
  const bool stopped = engine.stop_sequence(id, index, failed ? FinishReason::kError : FinishReason::kStop);
  if (!engine.has_request(id)) end(requests, watched, id);
  return stopped;
}

// For a sequence of a guided request: which tokens may come as its token number num_output_tokens. Since the caller
// looked, a signal handler may have run a step, or ended the request and given its id to another one: then nothing is
// changed, and the next step begins with a new look.
bool allow_tokens(Engine& engine, const py::dict& requests, const py::object& request, int64_t index,
                  int64_t num_output_tokens, const py::bytes& allowed) {
  const py::str id = request.attr("request_id");
  if (!requests.contains(id) || !request.is(requests[id])) return false;
  return engine.allow_tokens(id, index, num_output_tokens, bits_of(allowed));
}

// The GIL is free while the step computes.
void step(Engine& engine, const py::dict& requests, const py::dict& watched, const py::dict& moved) {
  std::vector<StepOutput> outputs;
  {
    py::gil_scoped_release release;
    outputs = engine.step();
  }
  const double time = steady_seconds();
  std::vector<py::str> ended;
  for (StepOutput& output : outputs) {
    const py::str id(output.request_id);
    const py::object request = requests[id];
    if (output.finish_reason != FinishReason::kNone && !engine.has_request(output.request_id)) ended.push_back(id);
    auto received = request.attr("received").cast<py::list>();
    if (is_just_a_token(output, received) && (watched.empty() || !watched.contains(id))) {
      received.append(output.token);
    } else {
      received.append(TimedOutput{std::move(output), time});
    }
    if (request.attr("owner").is_none()) moved[id] = request;
  }
  for (const py::str& id : ended)
    if (requests.contains(id))
      end(requests, watched, id);  // once, also when several of its sequences ended in this step
}

// Between the making of `output` and this call a signal handler may have run and called the engine. Then the request
// may be reported or aborted by now, or have moved on: so it stays in `moved`, for the next report.
void make_ready(const py::dict& moved, py::list& ready, const py::object& request, const py::object& output,
                py::size_t count) {
  const py::str id = request.attr("request_id");
  if (!moved.contains(id) || !request.is(moved[id])) return;
  if (request.attr("received").cast<py::list>().size() != count) return;
  ready.append(output);
  request.attr("reported") = count;
  erase(moved, id);
}

py::dict metrics_of(const Engine& engine) {
  const EngineMetrics& m = engine.metrics();
  const BlockAllocator& blocks = engine.allocator();
  py::dict d;
  d["num_requests_running"] = engine.scheduler().running().size();
  d["num_requests_waiting"] = engine.scheduler().waiting().size();
  d["num_blocks"] = blocks.num_blocks();
  d["num_free_blocks"] = blocks.free_blocks();
  d["num_cached_blocks"] = blocks.cached_blocks();
  d["kv_cache_usage"] = 1.0 - static_cast<double>(blocks.free_blocks()) / static_cast<double>(blocks.num_blocks());
  d["prefix_cache_query_tokens"] = blocks.stats().queried_tokens;
  d["prefix_cache_hit_tokens"] = blocks.stats().hit_tokens;
  d["num_evictions"] = blocks.stats().evictions;
  d["num_block_copies"] = blocks.stats().copies;
  d["num_steps"] = m.num_steps;
  d["num_prompt_tokens"] = m.num_prompt_tokens;
  d["num_generated_tokens"] = m.num_generated_tokens;
  d["num_computed_tokens"] = m.num_computed_tokens;
  d["num_preemptions"] = m.num_preemptions;
  d["num_finished"] = m.num_finished;
  d["num_aborted"] = m.num_aborted;
  d["bytes_read"] = m.bytes_read;
  d["schedule_seconds"] = m.schedule_seconds;
  d["forward_seconds"] = m.forward_seconds;
  d["sample_seconds"] = m.sample_seconds;
  return d;
}

// [sequences, steps] in the form of docs/trace.md, with tokens in place of text. None: they are not recorded.
py::object events_of(Engine& engine) {
  const EventLog* log = engine.events();
  if (!log) return py::none();
  py::list sequences, steps;
  for (const SequenceEvents& s : log->sequences()) {
    py::dict d;
    d["request_id"] = s.request_id;
    d["index"] = s.index;
    d["parent"] = s.parent < 0 ? py::object(py::none()) : py::int_(s.parent);
    d["priority"] = s.priority;
    d["arrival"] = s.arrival;
    d["end"] = s.end < 0 ? py::object(py::none()) : py::float_(s.end);
    d["finish_reason"] = name_of(s.finish_reason);
    d["prompt_token_ids"] = s.prompt;
    sequences.append(d);
  }
  for (const StepEvents& s : log->steps()) {
    py::dict d;
    d["times"] = py::make_tuple(s.schedule_start, s.forward_start, s.forward_end, s.end);
    d["num_tokens"] = s.num_tokens;
    d["running"] = s.num_running;
    d["waiting"] = s.num_waiting;
    d["free_blocks"] = s.free_blocks;
    d["cached_blocks"] = s.cached_blocks;
    d["released"] = s.released;
    d["preempted"] = s.preempted;
    d["evicted"] = s.evicted;
    py::list admitted, hits, tables, copies, chunks, sampled;
    for (const auto& a : s.admitted) admitted.append(py::make_tuple(a.sequence, a.num_cached_tokens));
    for (const auto& h : s.hits) hits.append(py::make_tuple(h.sequence, h.num_cached_tokens));
    for (const auto& t : s.tables) tables.append(py::make_tuple(t.sequence, t.first, t.blocks));
    for (const BlockCopy& c : s.copies) copies.append(py::make_tuple(c.src, c.dst));
    for (const auto& c : s.chunks) chunks.append(py::make_tuple(c.sequence, c.start, c.count));
    for (const auto& t : s.sampled) sampled.append(py::make_tuple(t.sequence, t.token, name_of(t.finish_reason)));
    d["admitted"] = admitted;
    d["hits"] = hits;
    d["tables"] = tables;
    d["copies"] = copies;
    d["chunks"] = chunks;
    d["sampled"] = sampled;
    steps.append(d);
  }
  return py::make_tuple(sequences, steps);
}

// Fixed for the life of the engine.
py::dict info_of(const Engine& engine) {
  const Transformer& t = engine.transformer();
  py::dict d;
  d["device"] = engine.backend().description();
  d["model_type"] = t.config().model_type;
  d["vocab_size"] = t.config().vocab_size;
  d["num_layers"] = t.config().num_layers;
  d["num_parameters"] = t.weights().num_parameters;
  d["weight_bytes"] = t.weights().bytes;
  d["bytes_read_per_step"] = t.bytes_read_per_step();
  d["kv_bytes_per_token"] = t.config().kv_bytes_per_token(t.dtype());
  d["num_blocks"] = t.num_blocks();
  d["block_size"] = engine.options().block_size;
  d["max_model_len"] = engine.options().max_model_len;
  d["max_num_seqs"] = engine.options().max_num_seqs;
  d["max_num_batched_tokens"] = engine.options().max_num_batched_tokens;
  d["max_total_len"] = engine.max_total_len();
  d["dtype"] = tiny_vllm::name_of(t.dtype());
  d["notes"] = t.weights().notes;
  return d;
}

}  // namespace

void bind_engine(py::module_& m) {
  py::class_<SamplingParams>(m, "SamplingParams", "See tiny_vllm.SamplingParams.")
      .def(py::init<>())
      .def_readwrite("n", &SamplingParams::n)
      .def_readwrite("temperature", &SamplingParams::temperature)
      .def_readwrite("top_k", &SamplingParams::top_k)
      .def_readwrite("top_p", &SamplingParams::top_p)
      .def_readwrite("min_p", &SamplingParams::min_p)
      .def_readwrite("repetition_penalty", &SamplingParams::repetition_penalty)
      .def_readwrite("frequency_penalty", &SamplingParams::frequency_penalty)
      .def_readwrite("presence_penalty", &SamplingParams::presence_penalty)
      .def_readwrite("seed", &SamplingParams::seed)
      .def_readwrite("max_tokens", &SamplingParams::max_tokens)
      .def_readwrite("ignore_eos", &SamplingParams::ignore_eos)
      .def_readwrite("stop_token_ids", &SamplingParams::stop_token_ids)
      .def_readwrite("min_tokens", &SamplingParams::min_tokens)
      .def_readwrite("logit_bias", &SamplingParams::logit_bias)
      .def_readwrite("allowed_token_ids", &SamplingParams::allowed_token_ids)
      .def_readwrite("bad_words", &SamplingParams::bad_words)
      .def_readwrite("logprobs", &SamplingParams::logprobs)
      .def_readwrite("prompt_logprobs", &SamplingParams::prompt_logprobs)
      .def("validate", &SamplingParams::validate, py::arg("vocab_size"));

  py::class_<EngineOptions>(m, "EngineOptions", "See tiny_vllm.EngineConfig, which holds the defaults.")
      .def(py::init<>())
      .def_property(
          "device", [](const EngineOptions& o) { return o.backend.device; },
          [](EngineOptions& o, const std::string& v) { o.backend.device = v; })
      .def_property(
          "num_threads", [](const EngineOptions& o) { return o.backend.num_threads; },
          [](EngineOptions& o, int v) { o.backend.num_threads = v; })
      .def_property(
          "cpu_isa", [](const EngineOptions& o) { return o.backend.cpu_isa; },
          [](EngineOptions& o, const std::string& v) { o.backend.cpu_isa = v; })
      .def_property(
          "enforce_eager", [](const EngineOptions& o) { return o.backend.enforce_eager; },
          [](EngineOptions& o, bool v) { o.backend.enforce_eager = v; })
      .def_property(
          "profile", [](const EngineOptions& o) { return o.backend.profile; },
          [](EngineOptions& o, bool v) { o.backend.profile = v; })
      .def_property(
          "dtype", [](const EngineOptions& o) { return std::string(tiny_vllm::name_of(o.dtype)); },
          [](EngineOptions& o, const std::string& v) { o.dtype = dtype_named(v); })
      .def_readwrite("dummy_weights", &EngineOptions::dummy_weights)
      .def_readwrite("seed", &EngineOptions::seed)
      .def_readwrite("eos_token_ids", &EngineOptions::eos_token_ids)
      .def_readwrite("block_size", &EngineOptions::block_size)
      .def_readwrite("max_model_len", &EngineOptions::max_model_len)
      .def_readwrite("max_num_seqs", &EngineOptions::max_num_seqs)
      .def_readwrite("max_num_batched_tokens", &EngineOptions::max_num_batched_tokens)
      .def_readwrite("kv_cache_memory_bytes", &EngineOptions::kv_cache_memory_bytes)
      .def_readwrite("memory_utilization", &EngineOptions::memory_utilization)
      .def_readwrite("scheduler", &EngineOptions::scheduler)
      .def_readwrite("scheduling_policy", &EngineOptions::scheduling_policy)
      .def_readwrite("record_events", &EngineOptions::record_events)
      .def_readwrite("enable_prefix_caching", &EngineOptions::enable_prefix_caching)
      .def_readwrite("enable_chunked_prefill", &EngineOptions::enable_chunked_prefill);

  py::class_<TokenLogprob>(m, "TokenLogprob")
      .def_readonly("token", &TokenLogprob::token)
      .def_readonly("logprob", &TokenLogprob::logprob)
      .def_readonly("rank", &TokenLogprob::rank);

  py::class_<TimedOutput>(m, "StepOutput", "What a step has to say about one sequence.")
      .def_readonly("request_id", &TimedOutput::request_id)
      .def_readonly("index", &TimedOutput::index)
      .def_readonly("token", &TimedOutput::token)
      .def_readonly("logprobs", &TimedOutput::logprobs)
      .def_readonly("prompt_logprobs", &TimedOutput::prompt_logprobs)
      .def_property_readonly("finish_reason", [](const TimedOutput& o) { return name_of(o.finish_reason); })
      .def_readonly("stop_token", &TimedOutput::stop_token)
      .def_readonly("error", &TimedOutput::error)
      .def_readonly("num_cached_tokens", &TimedOutput::num_cached_tokens)
      .def_readonly("time", &TimedOutput::time);

  py::class_<KernelRecord>(m, "KernelRecord", "One kernel that ran on a GPU: cpp/backend/kernel_record.h.")
      .def_readonly("name", &KernelRecord::name)
      .def_readonly("step", &KernelRecord::step)
      .def_readonly("tokens", &KernelRecord::tokens)
      .def_readonly("start_us", &KernelRecord::start_us)
      .def_readonly("duration_us", &KernelRecord::duration_us)
      .def_readonly("bytes", &KernelRecord::bytes)
      .def_readonly("flops", &KernelRecord::flops);

  py::class_<Engine>(m, "Engine", "See tiny_vllm.Engine. Not for two callers at once.")
      .def(py::init(&make_engine), py::arg("config_json"), py::arg("source"), py::arg("folder"), py::arg("options"),
           py::arg("progress") = py::none())
      .def("add_request", &add_request, py::arg("requests"), py::arg("watched"), py::arg("moved"), py::arg("ready"),
           py::arg("request"), py::arg("prompt_token_ids"), py::arg("params"), py::arg("priority") = 0,
           py::arg("allowed") = py::bytes())
      .def("abort_request", &abort_request, py::arg("requests"), py::arg("watched"), py::arg("moved"), py::arg("ready"),
           py::arg("request_id"))
      .def(
          "stop_sequence", &stop_sequence, py::arg("requests"), py::arg("watched"), py::arg("request"),
          py::arg("index"), py::arg("failed") = false,
          "Ends one sequence, because its text is complete, or because it cannot go on. False if it has ended already.")
      .def("allow_tokens", &allow_tokens, py::arg("requests"), py::arg("request"), py::arg("index"),
           py::arg("num_output_tokens"), py::arg("allowed"),
           "Says which tokens may come next in a sequence of a guided request. False if it is not that token's turn.")
      .def("step", &step, py::arg("requests"), py::arg("watched"), py::arg("moved"),
           "Runs one step. Each StepOutput goes to its request in `requests`; those without owner go into `moved`.")
      .def_static(
          "make_ready", &make_ready, py::arg("moved"), py::arg("ready"), py::arg("request"), py::arg("output"),
          py::arg("count"),
          "Puts the output into `ready` and takes its request out of `moved`, if the request is still there and "
          "has received `count` words, which is what the output was made of.")
      .def("has_unfinished_requests", &Engine::has_unfinished_requests)
      .def("check_invariants", [](const Engine& e) { e.scheduler().check_invariants(); })
      .def("take_profile", &Engine::take_profile, py::call_guard<py::gil_scoped_release>(),
           "The kernels that ran since the last call, in order; with EngineOptions.profile, else none.")
      .def("events", &events_of, "What has happened up to now, as lists: see tiny_vllm.Engine.events().")
      .def("metrics", &metrics_of)
      .def("info", &info_of);
}

}  // namespace tiny_vllm
