// Finds the block that already holds the keys and values of some text.
//
// The keys and values of a token depend on every token before it, so equal tokens are not enough: a block is known by
// its own tokens AND by what came before them. What came before is written as one number, the content id of the
// block before, and so a whole prefix is found by walking a chain, one block at a time:
//
//   (0, "The cat sat on") -> content 1     (1, "the mat and saw") -> content 2     (2, "a bird outside .") -> ...
//
// Two rules make it impossible to serve somebody else's keys and values:
//   - Tokens are compared one by one. The hash only says where to look, so a collision costs time, never truth.
//   - Content ids are counted up and never used twice. When a block is evicted and its text computed again, the new
//     block has a new id, and what hung on the old one can no longer be reached.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

#include "base/error.h"

namespace tiny_vllm {

// Content id of "nothing before": the parent of a first block, and the content of a block that is not registered.
constexpr uint64_t kNoContent = 0;

struct BlockKey {
  uint64_t parent = kNoContent;  // content id of the block before
  uint64_t salt = 0;             // texts with different salts never meet
  std::vector<int32_t> tokens;   // (BS)

  bool operator==(const BlockKey&) const = default;
};

using BlockHash = std::function<size_t(const BlockKey&)>;

size_t hash_block_key(const BlockKey& key);

class PrefixIndex {
 public:
  struct Entry {
    int32_t block = -1;
    uint64_t content = kNoContent;
  };

  // Tests pass a hash of their own to force collisions.
  explicit PrefixIndex(int64_t num_blocks, BlockHash hash = hash_block_key);
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  // Null when no block holds it.
  const Entry* find(const BlockKey& key) const;

  // Makes `block` findable by `key`, which must be new, and returns the id of its content.
  uint64_t insert(BlockKey key, int32_t block);

  // From now on the block's memory may be overwritten.
  void erase(int32_t block);

  bool contains(int32_t block) const { return key_of_block_[static_cast<size_t>(block)] != nullptr; }
  int64_t size() const { return static_cast<int64_t>(entries_.size()); }

  // Throws InternalError unless both directions, key -> block and block -> key, say the same.
  void check_invariants() const;

 private:
  std::unordered_map<BlockKey, Entry, BlockHash> entries_;
  std::vector<const BlockKey*> key_of_block_;  // (NB) null: not findable. The map never moves its keys.
  uint64_t next_content_ = kNoContent + 1;
};

}  // namespace tiny_vllm
