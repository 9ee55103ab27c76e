// Weights on disk: one safetensors file, and a folder of them.
//
// A safetensors file is: 8 bytes, the length N of the header, little-endian; N bytes of JSON that give each tensor's
// dtype, shape and place; then the tensors' bytes, one after the other without gaps, to the end of the file.
// The format: the README of the safetensors project, section "Format".
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/dtype.h"
#include "base/mapped_file.h"

namespace tiny_vllm {

struct TensorEntry {
  std::string name;
  bool supported = false;         // false: a dtype that the engine cannot compute with, such as I64 or F8_E4M3
  DType dtype = DType::kFloat32;  // when supported
  std::string dtype_name;         // as the file says: "BF16"
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;  // in the mapped file, at any alignment: the format promises none
  int64_t nbytes = 0;
  std::string file;

  int64_t numel() const;
};

// Elements [first, first + count) of the tensor -> out, as dst (kBFloat16 or kFloat32), rounded to nearest even.
// float16 -> bfloat16 goes through float32, so it rounds once. The tensor must be `supported`.
void convert_to(const TensorEntry& tensor, int64_t first, int64_t count, DType dst, void* out);
void convert_to(const TensorEntry& tensor, DType dst, void* out);  // all of it

// Everything is checked when the file is opened: a tensor that can be found can be read, to its last byte.
class SafetensorsFile {
 public:
  // Throws ModelLoadError naming the file, and the tensor where there is one.
  static SafetensorsFile open(const std::string& path);

  // The same over bytes that somebody else keeps alive. `name` stands for the path in messages.
  static SafetensorsFile from_bytes(std::span<const std::byte> bytes, const std::string& name);

  const std::string& path() const { return path_; }
  const std::vector<TensorEntry>& tensors() const { return tensors_; }  // in the order of their bytes
  const TensorEntry* find(std::string_view name) const;                 // nullptr: there is none

 private:
  SafetensorsFile() = default;
  void read(std::span<const std::byte> bytes, const std::string& name);

  MappedFile file_;
  std::string path_;
  std::vector<TensorEntry> tensors_;
  std::unordered_map<std::string_view, size_t> index_;  // the keys point into tensors_
};

// A model folder's weights: model.safetensors, or the shards that model.safetensors.index.json names, or the only
// *.safetensors file there is.
//
// The index must be right: every tensor it lists is in the shard it says, and no tensor is in two shards. A tensor
// that a shard holds but the index does not list can be used like any other (transformers does so too); a note says so.
class Checkpoint {
 public:
  // Throws ModelLoadError naming the file, and the tensor where there is one.
  static Checkpoint open(const std::string& folder);

  const std::string& folder() const { return folder_; }
  const std::vector<SafetensorsFile>& files() const { return files_; }
  const std::vector<std::string>& notes() const { return notes_; }  // what a person should know about the files
  const TensorEntry* find(std::string_view name) const;             // nullptr: there is none
  std::vector<std::string> names() const;                           // sorted
  int64_t nbytes() const;                                           // of all tensors

  // Iterates over pairs of (name, const TensorEntry*), sorted by name.
  auto begin() const { return index_.begin(); }
  auto end() const { return index_.end(); }

 private:
  Checkpoint() = default;
  void add_file(SafetensorsFile file);
  void open_shards(const std::string& index_path);

  std::string folder_;
  std::vector<SafetensorsFile> files_;
  std::vector<std::string> notes_;
  std::map<std::string_view, const TensorEntry*> index_;  // both point into files_
};

}  // namespace tiny_vllm
