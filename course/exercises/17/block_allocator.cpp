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
  explicit BlockAllocator(int num_blocks) {
    // Your turn.
  }

  int num_free() const {
    return -1;  // Your turn.
  }

  // Writes as many blocks as `table` has room for, all of which nobody owned. False, and no change, when there are
  // fewer.
  bool allocate(std::span<int32_t> table) {
    return false;  // Your turn.
  }

  // False, and no change, when not all of the table's blocks are owned.
  bool release(std::span<const int32_t> table) {
    return false;  // Your turn.
  }
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
