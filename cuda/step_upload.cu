#include "step_upload.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "backend/checks.h"

namespace tiny_vllm {
char* StepUpload::begin(Channel& channel, int64_t bytes) {
  Channel::Staging& staging = channel.staging[channel.next];
  staging.copied.wait();
  workspace_.reserve(channel.device, bytes);
  workspace_.reserve(staging.memory, bytes);
  return staging.memory.as();
}

const char* StepUpload::send(Channel& channel, int64_t bytes) {
  Channel::Staging& staging = channel.staging[channel.next];
  channel.next ^= 1;
  TV_CUDA(cudaMemcpyAsync(channel.device.as(), staging.memory.as(), static_cast<size_t>(bytes), cudaMemcpyHostToDevice,
                          stream_.handle));
  staging.copied.record(stream_);
  return channel.device.as();
}

template <typename T>
const T* StepUpload::upload(Channel& channel, const std::vector<T>& values) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
  workspace_.reserve(channel.device, 1);  // one address for all steps, also for those without values
  if (bytes > 0) std::memcpy(begin(channel, bytes), values.data(), static_cast<size_t>(bytes));
  return reinterpret_cast<const T*>(bytes > 0 ? send(channel, bytes) : channel.device.as());
}

DeviceBatch StepUpload::upload(const StepBatch& batch, const std::optional<Padding>& padding) {
  check_batch(batch);
  const int64_t tokens = batch.num_tokens(), requests = batch.num_requests();
  DeviceBatch d;
  d.num_tokens = padding ? padding->rows : tokens;
  d.num_requests = padding ? padding->rows : requests;
  d.num_logits_rows = padding ? padding->rows : std::ssize(batch.logits_rows);
  d.block_table_width = padding ? padding->block_table_width : batch.block_table_width;
  d.host = &batch;
  const int64_t added = d.num_tokens - tokens;

  // First where everything goes, each array at a multiple of 16 bytes; then the copies.
  int64_t bytes = 0;
  const auto place = [&](int64_t count, auto element) {
    const int64_t at = bytes;
    bytes += (count * static_cast<int64_t>(sizeof(element)) + 15) / 16 * 16;
    return at;
  };
  const int64_t cos_sin_row = tokens == 0 ? 0 : std::ssize(batch.cos_sin) / tokens;
  const bool samples = !batch.sampling.empty(), counts = !batch.token_counts_start.empty();
  const bool biases = !batch.token_biases_start.empty();
  const int64_t token_ids = place(d.num_tokens, int32_t{}), positions = place(d.num_tokens, int32_t{});
  const int64_t slot_mapping = place(d.num_tokens, int64_t{}), query_start = place(d.num_requests + 1, int32_t{});
  const int64_t context_len = place(d.num_requests, int32_t{});
  const int64_t logits_rows = place(d.num_logits_rows, int32_t{});
  const int64_t cos_sin = place(d.num_tokens * cos_sin_row, float{});
  const int64_t block_tables = place(d.num_requests * d.block_table_width, int32_t{});
  const int64_t sampling = place(samples ? d.num_logits_rows : 0, SampleRow{});
  const int64_t counts_start = place(counts ? d.num_logits_rows + 1 : 0, int32_t{});
  const int64_t biases_start = place(biases ? d.num_logits_rows + 1 : 0, int32_t{});

  char* host = begin(fixed_, bytes);
  const auto fill = [&](int64_t at, const auto& v, auto first, int32_t increment) {
    using Element = std::decay_t<decltype(v[0])>;
    auto* to = reinterpret_cast<Element*>(host + at);
    std::copy(v.begin(), v.end(), to);
    for (int64_t i = 0; i < added; ++i) to[std::ssize(v) + i] = static_cast<Element>(first + increment * i);
  };
  fill(token_ids, batch.token_ids, 0, 0);
  fill(positions, batch.positions, 0, 0);
  fill(slot_mapping, batch.slot_mapping, -1, 0);
  fill(query_start, batch.query_start, tokens + 1, 1);
  fill(context_len, batch.context_len, 0, 0);
  fill(logits_rows, batch.logits_rows, tokens, 1);
  std::copy(batch.cos_sin.begin(), batch.cos_sin.end(), reinterpret_cast<float*>(host + cos_sin));
  auto* table = reinterpret_cast<int32_t*>(host + block_tables);
  for (int64_t r = 0; r < requests; ++r)
    std::copy_n(batch.block_tables.begin() + r * batch.block_table_width, batch.block_table_width,
                table + r * d.block_table_width);
  if (samples) {
    auto* rows = reinterpret_cast<SampleRow*>(host + sampling);
    std::copy(batch.sampling.begin(), batch.sampling.end(), rows);
    std::fill_n(rows + std::ssize(batch.sampling), added, SampleRow{.temperature = 0});
  }
  if (counts) fill(counts_start, batch.token_counts_start, std::ssize(batch.token_counts), 0);
  if (biases) fill(biases_start, batch.token_biases_start, std::ssize(batch.token_biases), 0);
  const char* device = send(fixed_, bytes);

  const auto on_device = [&]<typename T>(int64_t at, const T*& pointer) {
    pointer = reinterpret_cast<const T*>(device + at);
  };
  on_device(token_ids, d.token_ids);
  on_device(positions, d.positions);
  on_device(slot_mapping, d.slot_mapping);
  on_device(query_start, d.query_start);
  on_device(context_len, d.context_len);
  on_device(block_tables, d.block_tables);
  on_device(cos_sin, d.cos_sin);
  on_device(logits_rows, d.logits_rows);
  if (samples) on_device(sampling, d.sampling);
  if (counts) {
    on_device(counts_start, d.token_counts_start);
    d.token_counts = upload(token_counts_, batch.token_counts);
  }
  if (biases) {
    on_device(biases_start, d.token_biases_start);
    d.token_biases = upload(token_biases_, batch.token_biases);
  }
  if (!batch.allowed.empty()) d.allowed = upload(allowed_, batch.allowed);
  return d;
}

}  // namespace tiny_vllm
