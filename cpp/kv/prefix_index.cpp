#include "kv/prefix_index.h"

#include <utility>

namespace tiny_vllm {

namespace {

// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): each input bit reaches each output bit.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

size_t hash_block_key(const BlockKey& key) {
  uint64_t h = mix(key.parent + 0x9e3779b97f4a7c15u);
  h = mix(h ^ key.salt);
  for (int32_t token : key.tokens) h = mix(h + 0x9e3779b97f4a7c15u + static_cast<uint32_t>(token));
  return static_cast<size_t>(h);
}

PrefixIndex::PrefixIndex(int64_t num_blocks, BlockHash hash)
    : entries_(0, std::move(hash)), key_of_block_(static_cast<size_t>(num_blocks), nullptr) {}

const PrefixIndex::Entry* PrefixIndex::find(const BlockKey& key) const {
  const auto it = entries_.find(key);
  return it == entries_.end() ? nullptr : &it->second;
}

uint64_t PrefixIndex::insert(BlockKey key, int32_t block) {
  TV_CHECK(!contains(block), "block ", block, " is already findable");
  const auto [it, is_new] = entries_.try_emplace(std::move(key), Entry{block, next_content_});
  TV_CHECK(is_new, "the content of block ", block, " is already held by block ", it->second.block);
  key_of_block_[static_cast<size_t>(block)] = &it->first;
  return next_content_++;
}

void PrefixIndex::erase(int32_t block) {
  TV_CHECK(contains(block), "block ", block, " is not findable");
  entries_.erase(entries_.find(*key_of_block_[static_cast<size_t>(block)]));
  key_of_block_[static_cast<size_t>(block)] = nullptr;
}

void PrefixIndex::check_invariants() const {
  int64_t findable = 0;
  for (const BlockKey* key : key_of_block_) findable += key != nullptr;
  TV_CHECK(findable == size(), findable, " blocks have a key, the index has ", size());
  for (const auto& [key, entry] : entries_) {
    TV_CHECK(key_of_block_[static_cast<size_t>(entry.block)] == &key, "block ", entry.block, " has another key");
    TV_CHECK(entry.content != kNoContent && entry.content < next_content_, "content id ", entry.content);
  }
}

}  // namespace tiny_vllm
