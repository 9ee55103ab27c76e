// The block allocator and the schedulers, without a model: for the tests, and for readers who want to watch them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "bindings/bindings.h"
#include "kv/block_allocator.h"
#include "sched/scheduler.h"

namespace py = pybind11;

namespace tiny_vllm {
namespace {

using Table = std::vector<int32_t>;

const char* name_of(RequestState state) {
  switch (state) {
    case RequestState::kWaiting:
      return "waiting";
    case RequestState::kRunning:
      return "running";
    case RequestState::kFinished:
      return "finished";
  }
  return nullptr;
}

std::pair<int32_t, int32_t> as_pair(const BlockCopy& copy) { return {copy.src, copy.dst}; }

void bind_block_allocator(py::module_& m) {
  py::class_<BlockAllocator>(m, "BlockAllocator",
                             "The pages of the KV cache: free, cached or owned. A block table is a list of ints.\n\n"
                             "Raises InternalError when it is used wrongly: a block released twice, an unknown block.")
      .def(py::init([](int64_t num_blocks, int64_t block_size, bool enable_prefix_caching,
                       std::optional<size_t> constant_hash) {
             BlockHash hash = hash_block_key;
             if (constant_hash) hash = [h = *constant_hash](const BlockKey&) { return h; };
             return std::make_unique<BlockAllocator>(num_blocks, block_size, enable_prefix_caching, std::move(hash));
           }),
           py::arg("num_blocks"), py::arg("block_size"), py::arg("enable_prefix_caching") = true, py::kw_only(),
           py::arg("constant_hash") = py::none(), "constant_hash: gives all blocks the same hash, for tests.")
      .def_property_readonly("num_blocks", &BlockAllocator::num_blocks)
      .def_property_readonly("block_size", &BlockAllocator::block_size)
      .def_property_readonly("free_blocks", &BlockAllocator::free_blocks, "Those that allocate() can hand out.")
      .def_property_readonly("cached_blocks", &BlockAllocator::cached_blocks)
      .def_property_readonly("owned_blocks", &BlockAllocator::owned_blocks)
      .def("ref_count", &BlockAllocator::ref_count, py::arg("block"))
      .def("is_writable", &BlockAllocator::is_writable, py::arg("block"))
      .def(
          "allocate",
          [](BlockAllocator& a, int64_t count) {
            Table table;
            return a.allocate(count, table) ? std::optional(table) : std::nullopt;
          },
          py::arg("count"), "A list of blocks, or None when there are fewer than `count`.")
      .def(
          "share", [](BlockAllocator& a, const Table& blocks) { a.share(blocks); }, py::arg("blocks"))
      .def(
          "release", [](BlockAllocator& a, const Table& table) { a.release(table); }, py::arg("block_table"))
      .def(
          "make_writable",
          [](BlockAllocator& a, const py::list& block_table, int64_t i) {
            auto table = block_table.cast<Table>();
            const std::optional<BlockCopy> copy = a.make_writable(table, i);
            if (copy) block_table[static_cast<size_t>(i)] = copy->dst;
            return copy ? std::optional(as_pair(*copy)) : std::nullopt;
          },
          py::arg("block_table"), py::arg("i"), "Changes block_table[i] if it must be copied: (source, destination).")
      .def(
          "find_prefix",
          [](const BlockAllocator& a, const Table& tokens, uint64_t salt, std::optional<int64_t> max_tokens,
             const Table& known) {
            return a.find_prefix(known, tokens, salt, max_tokens.value_or(static_cast<int64_t>(tokens.size())));
          },
          py::arg("tokens"), py::arg("salt") = 0, py::arg("max_tokens") = py::none(), py::arg("known") = Table{})
      .def(
          "register_blocks",
          [](BlockAllocator& a, const Table& table, const Table& tokens, uint64_t salt, int64_t begin,
             std::optional<int64_t> end) {
            a.register_blocks(table, tokens, salt, begin, end.value_or(static_cast<int64_t>(tokens.size())));
          },
          py::arg("block_table"), py::arg("tokens"), py::arg("salt") = 0, py::arg("begin") = 0,
          py::arg("end") = py::none())
      .def_property_readonly("stats",
                             [](const BlockAllocator& a) {
                               py::dict d;
                               d["queried_tokens"] = a.stats().queried_tokens;
                               d["hit_tokens"] = a.stats().hit_tokens;
                               d["evictions"] = a.stats().evictions;
                               d["copies"] = a.stats().copies;
                               return d;
                             })
      .def("check_invariants", &BlockAllocator::check_invariants,
           "Raises InternalError when the books do not balance.");
}

void bind_request(py::module_& m) {
  py::class_<Request, std::shared_ptr<Request>>(m, "Request", "One sequence of tokens on its way through a Scheduler.")
      .def(py::init([](std::string id, Table prompt, int64_t max_tokens, int64_t n, uint64_t arrival,
                       bool read_prefix_cache, uint64_t cache_salt, int64_t priority) {
             auto r = std::make_shared<Request>();
             r->id = std::move(id);
             r->tokens = std::move(prompt);
             r->num_prompt_tokens = r->num_tokens();
             r->max_total_tokens = r->num_tokens() + max_tokens;
             r->params.n = n;
             r->arrival = arrival;
             r->priority = priority;
             r->read_prefix_cache = read_prefix_cache;
             r->cache_salt = cache_salt;
             return r;
           }),
           py::arg("id"), py::arg("prompt"), py::arg("max_tokens"), py::kw_only(), py::arg("n") = 1,
           py::arg("arrival") = 0, py::arg("read_prefix_cache") = true, py::arg("cache_salt") = 0,
           py::arg("priority") = 0)
      .def_readonly("id", &Request::id)
      .def_readonly("index", &Request::index)
      .def_readonly("arrival", &Request::arrival)
      .def_readonly("priority", &Request::priority)
      .def_property_readonly("n", [](const Request& r) { return r.params.n; })
      .def_readonly("tokens", &Request::tokens)
      .def_readonly("num_prompt_tokens", &Request::num_prompt_tokens)
      .def_readonly("max_total_tokens", &Request::max_total_tokens)
      .def_readonly("num_computed_tokens", &Request::num_computed_tokens)
      .def_readonly("num_cached_tokens", &Request::num_cached_tokens)
      .def_readonly("num_preemptions", &Request::num_preemptions)
      .def_readonly("block_table", &Request::block_table)
      .def_readonly("cache_salt", &Request::cache_salt)
      .def_property_readonly("num_tokens", &Request::num_tokens)
      .def_property_readonly("num_output_tokens", &Request::num_output_tokens)
      .def_property_readonly("state", [](const Request& r) { return name_of(r.state); })
      .def(
          "append", [](Request& r, int32_t token) { r.tokens.push_back(token); }, py::arg("token"),
          "The token that the model has chosen.")
      .def("__repr__", [](const Request& r) {
        return str("<Request ", r.id, "[", r.index, "] ", name_of(r.state), ", ", r.num_computed_tokens, " of ",
                   r.num_tokens(), " tokens computed>");
      });
}

void bind_scheduler(py::module_& m) {
  py::class_<ScheduledChunk>(m, "ScheduledChunk", "Positions [start, start + count) of a request.")
      .def_property_readonly(
          "request", [](const ScheduledChunk& c) { return c.request; }, py::return_value_policy::reference)
      .def_readonly("start", &ScheduledChunk::start)
      .def_readonly("count", &ScheduledChunk::count);

  py::class_<StepPlan>(m, "StepPlan", "What one step computes, and the block copies (source, destination) before it.")
      .def_readonly("chunks", &StepPlan::chunks)
      .def_property_readonly("copies",
                             [](const StepPlan& plan) {
                               std::vector<std::pair<int32_t, int32_t>> pairs;
                               for (const BlockCopy& copy : plan.copies) pairs.push_back(as_pair(copy));
                               return pairs;
                             })
      .def_property_readonly(
          "admitted", [](const StepPlan& plan) { return plan.admitted; }, py::return_value_policy::reference)
      .def_property_readonly(
          "preempted", [](const StepPlan& plan) { return plan.preempted; }, py::return_value_policy::reference)
      .def_readonly("num_tokens", &StepPlan::num_tokens);

  py::class_<Scheduler>(m, "Scheduler",
                        "Decides, step by step, which tokens are computed next.\n\n"
                        "The loop: plan = schedule(); compute plan.chunks; commit(plan); append() a token to each "
                        "request whose chunk reached its end; remove() the finished ones.\n\n"
                        "Raises InvalidRequestError for an impossible configuration or request, with the numbers.")
      .def(py::init([](const std::string& policy, BlockAllocator& allocator, int64_t max_num_seqs,
                       int64_t max_num_batched_tokens, int64_t max_model_len, bool enable_chunked_prefill) {
             return make_scheduler(
                 policy, {max_num_seqs, max_num_batched_tokens, max_model_len, enable_chunked_prefill}, allocator);
           }),
           py::arg("policy"), py::arg("allocator"), py::kw_only(), py::arg("max_num_seqs"),
           py::arg("max_num_batched_tokens"), py::arg("max_model_len"), py::arg("enable_chunked_prefill") = true,
           py::keep_alive<1, 3>(), "policy: \"continuous\" or \"static\".")
      .def_property_readonly("max_total_len", &Scheduler::max_total_len)
      .def("add", &Scheduler::add, py::arg("request"), py::keep_alive<1, 2>())
      .def("remove", &Scheduler::remove, py::arg("request"))
      .def("schedule", &Scheduler::schedule, py::keep_alive<0, 1>())
      .def("commit", &Scheduler::commit, py::arg("plan"))
      .def(
          "fork",
          [](Scheduler& s, Request& parent, int64_t index) {
            auto child = std::make_shared<Request>(parent);
            child->index = index;
            s.fork(&parent, child.get());
            return child;
          },
          py::arg("parent"), py::arg("index"), py::keep_alive<1, 0>(),
          "A copy of `parent` that shares its blocks and runs on its own.")
      .def("has_unfinished", &Scheduler::has_unfinished)
      .def_property_readonly(
          "running", [](const Scheduler& s) { return s.running(); }, py::return_value_policy::reference)
      .def_property_readonly(
          "waiting", [](const Scheduler& s) { return s.waiting(); }, py::return_value_policy::reference)
      .def("check_invariants", &Scheduler::check_invariants, "Raises InternalError when the books do not balance.");
}

}  // namespace

void bind_kv(py::module_& m) {
  bind_block_allocator(m);
  bind_request(m);
  bind_scheduler(m);
}

}  // namespace tiny_vllm
