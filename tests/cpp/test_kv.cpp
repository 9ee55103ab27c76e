// The block allocator and the prefix index from C++. tests/test_block_allocator.py goes further, against a model.
#include <set>
#include <vector>

#include "check.h"
#include "kv/block_allocator.h"

namespace tiny_vllm {
namespace {

using Table = std::vector<int32_t>;

Table allocated(BlockAllocator& blocks, int64_t count) {
  Table table;
  CHECK(blocks.allocate(count, table));
  return table;
}

void check_counts(const BlockAllocator& blocks, int64_t free, int64_t cached, int64_t owned) {
  blocks.check_invariants();
  CHECK_EQ(blocks.free_blocks() - blocks.cached_blocks(), free);
  CHECK_EQ(blocks.cached_blocks(), cached);
  CHECK_EQ(blocks.owned_blocks(), owned);
  CHECK_EQ(free + cached + owned, blocks.num_blocks());
}

TEST(block_key_equality_and_hash) {
  const BlockKey key{1, 2, {3, 4}};
  std::set<size_t> hashes = {hash_block_key(key)};
  for (const BlockKey& other : {BlockKey{2, 2, {3, 4}}, BlockKey{1, 0, {3, 4}}, BlockKey{1, 2, {4, 3}},
                                BlockKey{1, 2, {3}}, BlockKey{2, 1, {3, 4}}, BlockKey{1, 2, {3, 4, 0}}}) {
    CHECK(!(key == other));
    hashes.insert(hash_block_key(other));
  }
  CHECK_EQ(hashes.size(), size_t{7});
  CHECK(key == BlockKey{1, 2, {3, 4}});
}

TEST(prefix_index_gives_each_content_a_new_id) {
  PrefixIndex index(4, [](const BlockKey&) { return size_t{0}; });
  const BlockKey a{kNoContent, 0, {1}};
  const BlockKey b{kNoContent, 0, {2}};
  const uint64_t first = index.insert(a, 0);
  const uint64_t second = index.insert(b, 1);
  CHECK(first != kNoContent && second != kNoContent && first != second);
  CHECK_EQ(index.find(a)->block, 0);
  CHECK_EQ(index.find(b)->block, 1);
  index.check_invariants();

  index.erase(0);
  CHECK(index.find(a) == nullptr);
  CHECK(!index.contains(0));
  const uint64_t again = index.insert(a, 0);
  CHECK(again != first && again != second);
  CHECK_THROWS(InternalError, "already held by block 0", index.insert(a, 2));
  CHECK_THROWS(InternalError, "already findable", index.insert(BlockKey{9, 0, {1}}, 0));
  CHECK_THROWS(InternalError, "not findable", index.erase(3));
  index.check_invariants();
}

TEST(prefix_index_survives_growth) {
  constexpr int32_t kBlocks = 5000;  // many times the table of buckets is made anew; keys must stay where they are
  PrefixIndex index(kBlocks);
  uint64_t parent = kNoContent;
  for (int32_t b = 0; b < kBlocks; ++b) parent = index.insert({parent, 0, {7, 7}}, b);
  index.check_invariants();
  for (int32_t b = 0; b < kBlocks; b += 2) index.erase(b);
  index.check_invariants();
  CHECK_EQ(index.size(), int64_t{kBlocks / 2});
}

TEST(allocator_states) {
  BlockAllocator blocks(4, 2, true);
  check_counts(blocks, 4, 0, 0);
  Table table = allocated(blocks, 3);
  check_counts(blocks, 1, 0, 3);
  CHECK(!blocks.allocate(2, table));
  CHECK_EQ(table.size(), size_t{3});

  const Table tokens = {1, 2, 3, 4, 5};
  blocks.register_blocks(table, tokens, 0, 0, 5);
  blocks.release(table);  // two full blocks stay findable, the third has no content
  check_counts(blocks, 2, 2, 0);
  CHECK(blocks.find_prefix({}, tokens, 0, 5) == Table({table[0], table[1]}));

  blocks.share(blocks.find_prefix({}, tokens, 0, 3));
  check_counts(blocks, 2, 1, 1);
  CHECK_EQ(blocks.ref_count(table[0]), 1);
  CHECK_THROWS(InternalError, "nothing to share", blocks.share(Table{table[2]}));
  CHECK_THROWS(InternalError, "released more often", blocks.release(Table{table[1]}));
  CHECK_THROWS(InternalError, "block 4 of 4", blocks.ref_count(4));
}

TEST(allocator_evicts_the_tail_first) {
  BlockAllocator blocks(3, 1, true);
  const Table tokens = {1, 2, 3};
  const Table table = allocated(blocks, 3);
  blocks.register_blocks(table, tokens, 0, 0, 3);
  blocks.release(table);
  for (size_t left = 3; left-- > 0;) {
    CHECK_EQ(allocated(blocks, 1)[0], table[left]);
    CHECK_EQ(blocks.find_prefix({}, tokens, 0, 3).size(), left);
  }
  CHECK_EQ(blocks.stats().evictions, 3);
}

TEST(allocator_copies_on_write) {
  BlockAllocator blocks(3, 4, true);
  Table parent = allocated(blocks, 1);
  Table child = parent;
  blocks.share(child);
  const auto copy = blocks.make_writable(child, 0);
  CHECK(copy.has_value() && copy->src == parent[0] && copy->dst == child[0] && child[0] != parent[0]);
  CHECK(!blocks.make_writable(parent, 0).has_value());
  CHECK(!blocks.make_writable(child, 0).has_value());
  CHECK_THROWS(InternalError, "entry 1", blocks.make_writable(child, 1));
  check_counts(blocks, 1, 0, 2);
}

TEST(allocator_refuses_impossible_sizes) {
  CHECK_THROWS(InvalidRequestError, "num_blocks is 0", BlockAllocator(0, 16, true));
  CHECK_THROWS(InvalidRequestError, "num_blocks is 2147483648", BlockAllocator(int64_t{1} << 31, 16, true));
  CHECK_THROWS(InvalidRequestError, "block_size is 0", BlockAllocator(1, 0, true));
}

}  // namespace
}  // namespace tiny_vllm
