// Exercise 17.1, in C++: the block allocator. (block_allocator.py is the same in Python. Write one or both.)
//
// Blocks are the numbers 0 ... num_blocks - 1. Each is free or in one block table, never both, never in two.
//
// allocate() is all or nothing. release() takes back a whole table, or refuses it and changes nothing: when it has a
// block that is free, one that does not exist, or one twice.
#include <cstdint>
#include <span>
#include <vector>

class BlockAllocator {
 public:
  explicit BlockAllocator(int num_blocks) : is_owned_(num_blocks, false) {
    for (int32_t b = num_blocks - 1; b >= 0; --b) free_.push_back(b);
  }

  int num_free() const { return static_cast<int>(free_.size()); }

  // Writes as many blocks as `table` has room for, all of which nobody owned. False, and no change, when there are
  // fewer.
  bool allocate(std::span<int32_t> table) {
    if (table.size() > free_.size()) return false;
    for (int32_t& block : table) {
      block = free_.back();
      free_.pop_back();
      is_owned_[block] = true;
    }
    return true;
  }

  // False, and no change, when not all of the table's blocks are owned.
  bool release(std::span<const int32_t> table) {
    size_t count = 0;
    for (; count < table.size() && owns(table[count]); ++count) is_owned_[table[count]] = false;
    if (count < table.size()) {  // free, unknown, or seen before in this table: as it was
      while (count > 0) is_owned_[table[--count]] = true;
      return false;
    }
    for (size_t i = table.size(); i-- > 0;) free_.push_back(table[i]);
    return true;
  }

 private:
  bool owns(int32_t block) const {
    return block >= 0 && block < static_cast<int32_t>(is_owned_.size()) && is_owned_[block];
  }

  std::vector<int32_t> free_;  // a stack: the last one is given first
  std::vector<bool> is_owned_;
};

// What the test calls.
extern "C" BlockAllocator* make(int num_blocks) { return new BlockAllocator(num_blocks); }
extern "C" void destroy(BlockAllocator* blocks) { delete blocks; }
extern "C" int num_free(const BlockAllocator* blocks) { return blocks->num_free(); }
extern "C" bool allocate(BlockAllocator* blocks, int32_t* table, int count) {
  return blocks->allocate({table, static_cast<size_t>(count)});
}
extern "C" bool release(BlockAllocator* blocks, const int32_t* table, int count) {
  return blocks->release({table, static_cast<size_t>(count)});
}
