#include "kv/block_allocator.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace tiny_vllm {

namespace {

int64_t checked_num_blocks(int64_t num_blocks) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (num_blocks < 1 || num_blocks > kMax) {
    throw InvalidRequestError(str("num_blocks is ", num_blocks, "; it must be between 1 and ", kMax,
                                  ". Give the KV cache more memory, or less of it."));
  }
  return num_blocks;
}

int64_t checked_block_size(int64_t block_size) {
  constexpr int64_t kMax = 1 << 20;
  if (block_size < 1 || block_size > kMax) {
    throw InvalidRequestError(str("block_size is ", block_size, "; it must be between 1 and ", kMax, " tokens"));
  }
  return block_size;
}

}  // namespace

BlockAllocator::BlockAllocator(int64_t num_blocks, int64_t block_size, bool enable_prefix_caching, BlockHash hash)
    : block_size_(checked_block_size(block_size)),
      enable_prefix_caching_(enable_prefix_caching),
      blocks_(static_cast<size_t>(checked_num_blocks(num_blocks))),
      index_(num_blocks, std::move(hash)) {
  free_.reserve(blocks_.size());
  for (int64_t b = num_blocks - 1; b >= 0; --b) free_.push_back(static_cast<int32_t>(b));
}

BlockAllocator::Block& BlockAllocator::at(int32_t block) {
  TV_CHECK(block >= 0 && block < num_blocks(), "block ", block, " of ", num_blocks());
  return blocks_[static_cast<size_t>(block)];
}

const BlockAllocator::Block& BlockAllocator::at(int32_t block) const {
  TV_CHECK(block >= 0 && block < num_blocks(), "block ", block, " of ", num_blocks());
  return blocks_[static_cast<size_t>(block)];
}

// --- Owning blocks ---

bool BlockAllocator::allocate(int64_t count, std::vector<int32_t>& table) {
  TV_CHECK(count >= 0, "allocate ", count, " blocks");
  if (count > free_blocks()) return false;
  for (int64_t i = 0; i < count; ++i) table.push_back(take_block());
  return true;
}

int32_t BlockAllocator::take_block() {
  int32_t block;
  if (!free_.empty()) {
    block = free_.back();
    free_.pop_back();
  } else {
    block = cached_.front();
    cached_.pop_front();
    index_.erase(block);  // at once: its new owner is going to overwrite it
    ++stats_.evictions;
    if (notes_evicted_) evicted_.push_back(block);
  }
  at(block).ref_count = 1;
  at(block).content = kNoContent;
  return block;
}

void BlockAllocator::share(std::span<const int32_t> blocks) {
  for (int32_t b : blocks) {
    Block& block = at(b);
    if (block.ref_count == 0) {
      TV_CHECK(index_.contains(b), "block ", b, " is free and has nothing to share");
      cached_.erase(block.lru_place);
    }
    ++block.ref_count;
  }
}

void BlockAllocator::release(std::span<const int32_t> table) {
  for (size_t i = table.size(); i-- > 0;) {
    const int32_t b = table[i];
    Block& block = at(b);
    TV_CHECK(block.ref_count > 0, "block ", b, " is released more often than it is owned");
    if (--block.ref_count > 0) continue;
    if (index_.contains(b)) {
      block.lru_place = cached_.insert(cached_.end(), b);
    } else {
      block.content = kNoContent;
      free_.push_back(b);
    }
  }
}

std::optional<BlockCopy> BlockAllocator::make_writable(std::vector<int32_t>& table, int64_t i) {
  TV_CHECK(i >= 0 && i < static_cast<int64_t>(table.size()), "entry ", i, " of a table of ", table.size());
  int32_t& entry = table[static_cast<size_t>(i)];
  if (is_writable(entry)) return std::nullopt;
  TV_CHECK(free_blocks() > 0, "no block left for a copy of block ", entry);
  const BlockCopy copy{entry, take_block()};
  release({&copy.src, 1});
  entry = copy.dst;
  ++stats_.copies;
  return copy;
}

// --- Finding blocks ---

BlockKey BlockAllocator::key_of(uint64_t parent, std::span<const int32_t> tokens, uint64_t salt, int64_t i) const {
  const auto first = tokens.begin() + i * block_size_;
  return {parent, salt, std::vector<int32_t>(first, first + block_size_)};
}

std::vector<int32_t> BlockAllocator::find_prefix(std::span<const int32_t> known, std::span<const int32_t> tokens,
                                                 uint64_t salt, int64_t max_tokens) const {
  std::vector<int32_t> found;
  if (!enable_prefix_caching_) return found;
  uint64_t parent = known.empty() ? kNoContent : at(known.back()).content;
  TV_CHECK(known.empty() || parent != kNoContent, "block ", known.back(), " is not registered yet");
  const int64_t full_blocks = std::min(max_tokens, static_cast<int64_t>(tokens.size())) / block_size_;
  for (int64_t i = static_cast<int64_t>(known.size()); i < full_blocks; ++i) {
    const PrefixIndex::Entry* entry = index_.find(key_of(parent, tokens, salt, i));
    if (entry == nullptr) break;
    found.push_back(entry->block);
    parent = entry->content;
  }
  return found;
}

void BlockAllocator::register_blocks(std::span<const int32_t> table, std::span<const int32_t> tokens, uint64_t salt,
                                     int64_t begin, int64_t end) {
  if (!enable_prefix_caching_) return;
  TV_CHECK(begin >= 0 && begin <= end && end <= static_cast<int64_t>(tokens.size()) &&
               end <= static_cast<int64_t>(table.size()) * block_size_,
           "tokens [", begin, ", ", end, ") of ", tokens.size(), " in ", table.size(), " blocks");
  for (int64_t i = begin / block_size_; i < end / block_size_; ++i) {
    const int32_t b = table[static_cast<size_t>(i)];
    const uint64_t parent = i == 0 ? kNoContent : at(table[static_cast<size_t>(i - 1)]).content;
    TV_CHECK(i == 0 || parent != kNoContent, "block ", i, " of a table is registered before block ", i - 1);
    TV_CHECK(is_writable(b), "block ", b, " is registered twice, or shared before it was full");
    BlockKey key = key_of(parent, tokens, salt, i);
    const PrefixIndex::Entry* first = index_.find(key);
    at(b).content = first != nullptr ? first->content : index_.insert(std::move(key), b);
  }
}

// --- Watching ---

void BlockAllocator::check_invariants() const {
  std::vector<int> seen(blocks_.size(), 0);
  for (int32_t b : free_) {
    ++seen[static_cast<size_t>(b)];
    TV_CHECK(at(b).ref_count == 0, "free block ", b, " has ", at(b).ref_count, " owners");
    TV_CHECK(at(b).content == kNoContent && !index_.contains(b), "free block ", b, " has content");
  }
  for (auto it = cached_.begin(); it != cached_.end(); ++it) {
    ++seen[static_cast<size_t>(*it)];
    TV_CHECK(at(*it).ref_count == 0, "cached block ", *it, " has ", at(*it).ref_count, " owners");
    TV_CHECK(index_.contains(*it), "cached block ", *it, " cannot be found");
  }
  for (int32_t b = 0; b < num_blocks(); ++b) {
    const Block& block = at(b);
    TV_CHECK(block.ref_count >= 0, "block ", b, " has ", block.ref_count, " owners");
    TV_CHECK(seen[static_cast<size_t>(b)] + (block.ref_count > 0) == 1, "block ", b, " is in ",
             seen[static_cast<size_t>(b)], " lists and has ", block.ref_count, " owners");
    TV_CHECK(!index_.contains(b) || block.content != kNoContent, "block ", b, " is findable without content");
  }
  index_.check_invariants();
}

}  // namespace tiny_vllm
