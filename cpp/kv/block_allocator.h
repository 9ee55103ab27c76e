// The pages of the KV cache: who owns which block, which are free, and which hold a prefix worth finding again.
//
// Bookkeeping only. The memory itself belongs to the backend (README.md in this folder shows its layout); here a
// block is a number, and a sequence is a list of such numbers, its block table. A block is in one of three states:
//
//             allocate                    release, findable
//     free --------------->  owned  ------------------------------->  cached
//       ^                     | ^                                       |
//       +---------------------+ +---------------------------------------+
//        release, not findable    share, when somebody finds its text;
//                                 allocate, when nothing is free: evicted, and no longer findable
//
//   free    nothing in it
//   cached  in no block table, but its content can be found; the least recently used is reused first
//   owned   in one block table or more; it can be found as well, once its content is registered
//
//   free + cached + owned == num_blocks, at any time.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kv/prefix_index.h"

namespace tiny_vllm {

// "Copy the keys and values of block src to block dst, in every layer."
struct BlockCopy {
  int32_t src = -1;
  int32_t dst = -1;
};

struct BlockStats {
  int64_t queried_tokens = 0;  // tokens of requests that looked for a cached prefix
  int64_t hit_tokens = 0;      // of those, tokens that were found
  int64_t evictions = 0;       // cached blocks that were given to somebody else
  int64_t copies = 0;          // blocks copied because a shared one was about to be written
};

class BlockAllocator {
 public:
  // Throws InvalidRequestError when num_blocks or block_size is out of range.
  BlockAllocator(int64_t num_blocks, int64_t block_size, bool enable_prefix_caching, BlockHash hash = hash_block_key);

  int64_t num_blocks() const { return static_cast<int64_t>(blocks_.size()); }
  int64_t block_size() const { return block_size_; }
  bool prefix_caching() const { return enable_prefix_caching_; }
  int64_t blocks_for(int64_t num_tokens) const { return (num_tokens + block_size_ - 1) / block_size_; }

  // Blocks that allocate() can hand out: the free and the cached ones.
  int64_t free_blocks() const { return static_cast<int64_t>(free_.size() + cached_.size()); }
  int64_t cached_blocks() const { return static_cast<int64_t>(cached_.size()); }
  int64_t owned_blocks() const { return num_blocks() - free_blocks(); }
  int64_t ref_count(int32_t block) const { return at(block).ref_count; }

  // --- Owning blocks ---

  // Appends `count` blocks to the table, all or nothing: false, and no change, when there are fewer.
  [[nodiscard]] bool allocate(int64_t count, std::vector<int32_t>& table);

  // One more owner for each of these blocks. A found prefix is taken with it, and so is the table of a fork.
  void share(std::span<const int32_t> blocks);

  // One owner less. The tail of a sequence becomes older than its head, and so it is evicted first: a prefix without
  // its continuation is useful, a continuation without its prefix cannot be reached.
  void release(std::span<const int32_t> table);

  // A block may be written by its only owner, and only as long as nobody can find it.
  bool is_writable(int32_t block) const { return at(block).ref_count == 1 && at(block).content == kNoContent; }

  // Copy-on-write. Makes table[i] writable: a block that is not is replaced by a new one, and the copy to be done on
  // the device before the next write is returned. The caller has made sure that there is a free block.
  std::optional<BlockCopy> make_writable(std::vector<int32_t>& table, int64_t i);

  // --- Finding blocks ---

  // The blocks that hold the tokens after those of `known`, block by block as long as they are found, never more than
  // the first max_tokens tokens of the sequence. `known` is the beginning of the sequence's block table; empty: from
  // the start. The caller becomes an owner by share(), before it allocates: allocating may evict what was found.
  std::vector<int32_t> find_prefix(std::span<const int32_t> known, std::span<const int32_t> tokens, uint64_t salt,
                                   int64_t max_tokens) const;

  // Makes the blocks that tokens [begin, end) have filled up findable. To be called once their keys and values ARE
  // written, and in order: [0, a), [a, b), ... When two sequences have computed the same text, the first block stays
  // the one that is found, and the second stays private; both go on under the same content id.
  void register_blocks(std::span<const int32_t> table, std::span<const int32_t> tokens, uint64_t salt, int64_t begin,
                       int64_t end);

  // --- Watching ---

  void count_prefix_lookup(int64_t queried_tokens, int64_t hit_tokens) {
    stats_.queried_tokens += queried_tokens;
    stats_.hit_tokens += hit_tokens;
  }
  const BlockStats& stats() const { return stats_; }

  // From now on, notes which blocks are evicted; take_evicted() says which were since its last call.
  void note_evicted() { notes_evicted_ = true; }
  std::vector<int32_t> take_evicted() { return std::exchange(evicted_, {}); }

  // Throws InternalError when a block is in two states or in none, or can be found though it should not be.
  void check_invariants() const;

 private:
  struct Block {
    int64_t ref_count = 0;                   // block tables that it is in
    uint64_t content = kNoContent;           // set by register_blocks
    std::list<int32_t>::iterator lru_place;  // in cached_, while it is there
  };

  Block& at(int32_t block);
  const Block& at(int32_t block) const;
  int32_t take_block();
  BlockKey key_of(uint64_t parent, std::span<const int32_t> tokens, uint64_t salt, int64_t i) const;

  int64_t block_size_;
  bool enable_prefix_caching_;
  std::vector<Block> blocks_;
  std::vector<int32_t> free_;  // a stack
  std::list<int32_t> cached_;  // least recently used first
  PrefixIndex index_;
  BlockStats stats_;
  bool notes_evicted_ = false;
  std::vector<int32_t> evicted_;
};

}  // namespace tiny_vllm
