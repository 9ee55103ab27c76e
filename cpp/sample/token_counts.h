// Which tokens a sequence has, and how often: what penalties need to know.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "backend/step_batch.h"

namespace tiny_vllm {

class TokenCounts {
 public:
  void add(int32_t token, bool is_output) {
    const auto [place, is_new] = places_.try_emplace(token, counts_.size());
    if (is_new) counts_.push_back({token, 0});
    counts_[place->second].count += is_output;
    ++num_counted_;
  }
  int64_t num_counted() const { return num_counted_; }
  const std::vector<TokenCount>& all() const { return counts_; }  // each token once

 private:
  std::vector<TokenCount> counts_;
  std::unordered_map<int32_t, size_t> places_;
  int64_t num_counted_ = 0;
};

}  // namespace tiny_vllm
