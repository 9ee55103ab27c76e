#include "device_sampler.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "kernels/kernels.h"

namespace tiny_vllm {

DeviceSampler::Needs DeviceSampler::needs(const StepBatch& batch) {
  Needs n;
  n.tokens = !batch.sampling.empty();
  n.sets = !batch.allowed.empty();
  n.biases = !batch.token_biases_start.empty();
  n.penalties = !batch.token_counts_start.empty();
  for (const SampleRow& row : batch.sampling) {
    n.filters |= has_filter(row, std::numeric_limits<int64_t>::max());
    n.logprobs |= row.num_logprobs >= 0;
  }
  return n;
}

void DeviceSampler::prepare(const DeviceBatch& batch) {
  needs_ = needs(*batch.host);
  if (!needs_.tokens) return;
  const int64_t n = batch.num_logits_rows, row = (1 + kMaxLogprobs) * int64_t{sizeof(DeviceLogprob)};
  using enum Workspace::Fill;
  workspace_.reserve(tokens_, n * 4, kKeep);  // this step may begin with the tokens of the last
  workspace_.reserve(partials_, sampling_partial_bytes(stream_, n));
  workspace_.reserve(counters_, n * 4, kZero);
  if (needs_.filters) workspace_.reserve(cuts_, n * 8);
  if (needs_.logprobs) workspace_.reserve(logprobs_, n * row, kZero);
  if (needs_.penalties) workspace_.reserve(last_tokens_, n * 4);
}

void DeviceSampler::sample(const Tensor& logits, const DeviceBatch& batch, int64_t begin) {
  const int64_t n = logits.shape[0], vocab_size = logits.shape[1];
  TV_CHECK(needs_.tokens && logits.dtype == DType::kFloat32 && begin + n <= batch.num_logits_rows, "logits are ",
           name_of(logits.dtype), " ", logits.shape_string(), " for rows from ", begin, " on of ",
           batch.num_logits_rows);
  if (needs_.raw()) {
    workspace_.reserve(raw_, logits.nbytes());
    keep_raw(stream_, logits.as<float>(), batch.sampling + begin, raw_.as<float>(), n, vocab_size);
  }
  if (needs_.sets || needs_.biases) {
    EditArgs edits;
    edits.logits = logits.as<float>();
    edits.rows = batch.sampling + begin;
    edits.biases = batch.token_biases;
    edits.starts = needs_.biases ? batch.token_biases_start + begin : nullptr;
    edits.allowed = batch.allowed;
    edits.n = n;
    edits.vocab_size = vocab_size;
    edit_logits(stream_, edits);
  }
  if (needs_.penalties) {
    PenaltyArgs penalties;
    gather_rows(stream_, batch.token_ids, batch.logits_rows + begin, last_tokens_.as(), n, 4);
    penalties.logits = logits.as<float>();
    penalties.rows = batch.sampling + begin;
    penalties.counts = batch.token_counts;
    penalties.starts = batch.token_counts_start + begin;
    penalties.last_tokens = last_tokens_.as<int32_t>();
    penalties.n = n;
    penalties.vocab_size = vocab_size;
    penalize(stream_, penalties);
  }

  SamplingArgs args;
  args.logits = logits.as<float>();
  args.rows = batch.sampling + begin;
  args.n = n;
  args.vocab_size = vocab_size;
  if (needs_.filters) args.cuts = cuts_.as<uint64_t>();
  args.partials = partials_.as();
  args.counters = counters_.as<unsigned>();
  args.tokens = tokens_.as<int32_t>() + begin;
  sample_rows(stream_, args);
  if (!needs_.logprobs) return;

  LogprobsArgs probabilities;
  probabilities.logits = needs_.raw() ? raw_.as<float>() : logits.as<float>();
  probabilities.rows = batch.sampling + begin;
  probabilities.tokens = args.tokens;
  probabilities.n = n;
  probabilities.vocab_size = vocab_size;
  probabilities.out = logprobs_.as<DeviceLogprob>() + begin * (1 + kMaxLogprobs);
  logprobs(stream_, probabilities);
}

int64_t DeviceSampler::send(int64_t n) {
  Outgoing& out = outgoing_[sent_ % 2];
  const int64_t logprob_bytes = n * (1 + kMaxLogprobs) * int64_t{sizeof(DeviceLogprob)};
  out.n = n;
  out.has_logprobs = n > 0 && needs_.logprobs;
  workspace_.reserve(out.tokens, n * 4);
  const auto copy = [&](const Memory& to, const Memory& from, int64_t bytes) {
    TV_CUDA(cudaMemcpyAsync(to.as(), from.as(), static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream_.handle));
  };
  if (n > 0) copy(out.tokens, tokens_, n * 4);
  if (out.has_logprobs) {
    workspace_.reserve(out.logprobs, logprob_bytes);
    copy(out.logprobs, logprobs_, logprob_bytes);
  }
  out.arrived.record(stream_);
  return sent_++;
}

Sampled DeviceSampler::receive(int64_t ticket) {
  TV_CHECK(ticket >= sent_ - 2 && ticket < sent_, "ticket ", ticket, " of ", sent_, " is not on its way");
  Outgoing& out = outgoing_[ticket % 2];
  out.arrived.wait();
  Sampled sampled;
  sampled.tokens = {out.tokens.as<int32_t>(), static_cast<size_t>(out.n)};
  if (out.has_logprobs)
    sampled.logprobs = {out.logprobs.as<DeviceLogprob>(), static_cast<size_t>(out.n * (1 + kMaxLogprobs))};
  return sampled;
}

}  // namespace tiny_vllm
