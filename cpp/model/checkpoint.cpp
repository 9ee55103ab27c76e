// Checkpoint: the folder half of model/safetensors.h.
#include <algorithm>
#include <filesystem>
#include <system_error>

#include "base/error.h"
#include "base/printable.h"
#include "model/json_reader.h"
#include "model/safetensors.h"

namespace tiny_vllm {
namespace {

namespace fs = std::filesystem;

constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr int kMaxDepth = 16;                   // of the parts of the index that are skipped
constexpr int64_t kMaxIndexBytes = 32'000'000;  // that of a model with 100,000 tensors has some ten million

[[noreturn]] void refuse(const std::string& file, const std::string& why) {
  throw ModelLoadError(str(printable(file, 4096), ": ", why));
}

// {"metadata": anything, "weight_map": {"tensor": "file"}}
class IndexReader final : public JsonReader {
 public:
  explicit IndexReader(const std::string& file) : file_(file) {}

  std::map<std::string, std::string> take() {
    if (!seen_weight_map_) refuse(file_, "has no weight_map");
    return std::move(weight_map_);
  }

  bool null() override { return value("null"); }
  bool boolean(bool) override { return value("true or false"); }
  bool number_integer(number_integer_t) override { return value("a number"); }
  bool number_unsigned(number_unsigned_t) override { return value("a number"); }
  bool number_float(number_float_t, const string_t&) override { return value("a number"); }

  bool string(string_t& text) override {
    if (depth_ != 2 || !in_map_) return value("a string");
    if (!weight_map_.emplace(name_, text).second)
      refuse(file_, str("weight_map lists tensor '", printable(name_), "' twice"));
    return true;
  }

  bool start_object(size_t) override {
    if (depth_ == 0 || (depth_ == 1 && in_map_)) return enter();
    return value("an object") && enter();
  }
  bool start_array(size_t) override { return value("a list") && enter(); }
  bool end_object() override { return leave(); }
  bool end_array() override { return leave(); }

  bool key(string_t& text) override {
    if (depth_ == 1) {
      in_map_ = text == "weight_map";
      if (in_map_ && std::exchange(seen_weight_map_, true)) refuse(file_, "has two weight_map fields");
    } else if (in_map_) {
      name_ = text;
    }
    return true;
  }

  [[noreturn]] void throw_invalid(int64_t position) const override {
    refuse(file_, str("is not valid JSON at byte ", position));
  }

 private:
  // A value that is not the root, not the map, and not a file name in the map.
  bool value(const char* found) const { return depth_ == 0 || in_map_ ? unexpected(found) : true; }

  bool unexpected(const char* found) const override {
    if (depth_ == 0) refuse(file_, str("must be a JSON object, found ", found));
    if (depth_ == 1) refuse(file_, str("weight_map must map tensor names to file names, found ", found));
    refuse(file_, str("weight_map: tensor '", printable(name_), "' must name a file, found ", found));
  }

  bool enter() {
    if (++depth_ > kMaxDepth) refuse(file_, str("is nested more than ", kMaxDepth, " deep"));
    return true;
  }
  bool leave() {
    --depth_;
    return true;
  }

  const std::string& file_;
  int depth_ = 0;
  bool in_map_ = false;
  bool seen_weight_map_ = false;
  std::string name_;
  std::map<std::string, std::string> weight_map_;
};

// The file must lie in the model's folder: an index cannot point anywhere else.
bool is_plain_file_name(const std::string& name) {
  return name.ends_with(".safetensors") && name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
}

std::string join(const std::string& folder, const std::string& name) { return (fs::path(folder) / name).string(); }

bool exists(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

std::string list_some(const std::vector<std::string>& names) {
  constexpr size_t kMost = 5;
  std::string s;
  for (size_t i = 0; i < std::min(names.size(), kMost); ++i) s += (i ? ", " : "") + printable(names[i]);
  return names.size() > kMost ? str(s, " and ", names.size() - kMost, " more") : s;
}

std::vector<std::string> file_names(const std::string& folder) {
  std::error_code error;
  std::vector<std::string> names;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    names.push_back(it->path().filename().string());
  if (error) refuse(folder, str("cannot read the folder: ", error.message()));
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

Checkpoint Checkpoint::open(const std::string& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) refuse(folder, exists(folder) ? "is not a folder" : "no such folder");
  Checkpoint checkpoint;
  checkpoint.folder_ = folder;
  const std::string index_path = join(folder, kIndexFile);
  if (exists(join(folder, kSingleFile))) {
    if (exists(index_path))
      checkpoint.notes_.push_back(
          str(printable(folder, 4096), ": has both ", kSingleFile, " and ", kIndexFile, "; the first is used"));
    checkpoint.add_file(SafetensorsFile::open(join(folder, kSingleFile)));
    return checkpoint;
  }
  if (exists(index_path)) {
    checkpoint.open_shards(index_path);
    return checkpoint;
  }

  std::vector<std::string> found;
  std::vector<std::string> pickles;
  for (const std::string& name : file_names(folder)) {
    if (name.ends_with(".safetensors")) found.push_back(name);
    if (name.starts_with("pytorch_model") && (name.ends_with(".bin") || name.ends_with(".bin.index.json")))
      pickles.push_back(name);
  }
  if (found.size() == 1) {
    checkpoint.add_file(SafetensorsFile::open(join(folder, found[0])));
    return checkpoint;
  }
  std::string why = str("no weights: looked for ", kSingleFile, ", ", kIndexFile, " and a single *.safetensors file");
  if (!found.empty())
    why += str("; there are ", found.size(), " (", list_some(found), ") but no index that says what is where");
  if (!pickles.empty())
    why += str("; ", list_some(pickles), " is a PyTorch pickle: convert the model to safetensors first, with ",
               "save_pretrained(folder, safe_serialization=True) of transformers");
  refuse(folder, why);
}

void Checkpoint::add_file(SafetensorsFile file) {
  files_.push_back(std::move(file));
  for (const TensorEntry& tensor : files_.back().tensors()) {
    const auto [it, is_new] = index_.emplace(tensor.name, &tensor);
    if (!is_new)
      refuse(folder_, str("tensor '", printable(tensor.name), "' is in two files: ", printable(it->second->file, 4096),
                          " and ", printable(tensor.file, 4096)));
  }
}

void Checkpoint::open_shards(const std::string& index_path) {
  const MappedFile index_file = MappedFile::open(index_path);
  if (index_file.size() > kMaxIndexBytes)
    refuse(index_path, str("has ", index_file.size(), " bytes; at most ", kMaxIndexBytes, " are read"));
  IndexReader reader(index_path);
  read_json({reinterpret_cast<const char*>(index_file.data()), static_cast<size_t>(index_file.size())}, reader);
  const std::map<std::string, std::string> weight_map = reader.take();
  if (weight_map.empty()) refuse(index_path, "weight_map is empty");

  std::map<std::string, bool> shards;  // name -> it is there
  for (const auto& [tensor, file] : weight_map) {
    if (!is_plain_file_name(file))
      refuse(index_path, str("weight_map: tensor '", printable(tensor), "' names '", printable(file),
                             "', which is not the plain name of a .safetensors file"));
    if (shards.count(file) == 0) shards[file] = exists(join(folder_, file));
  }
  std::vector<std::string> missing;
  for (const auto& [file, is_there] : shards)
    if (!is_there) missing.push_back(file);
  if (!missing.empty())
    refuse(folder_, str(missing.size(), " of ", shards.size(), " files that ", kIndexFile, " names ",
                        missing.size() == 1 ? "is" : "are", " missing: ", list_some(missing)));

  files_.reserve(shards.size());
  for (const auto& [file, is_there] : shards) add_file(SafetensorsFile::open(join(folder_, file)));

  for (const auto& [tensor, file] : weight_map) {
    const TensorEntry* entry = find(tensor);
    if (entry == nullptr || entry->file != join(folder_, file))
      refuse(index_path, str("weight_map says that tensor '", printable(tensor), "' is in ", printable(file),
                             entry == nullptr ? ", but it is not there" : str(", but it is in ", entry->file)));
  }
  std::vector<std::string> unlisted;
  for (const auto& [name, entry] : index_)
    if (weight_map.count(std::string(name)) == 0) unlisted.emplace_back(name);
  if (!unlisted.empty())
    notes_.push_back(str(printable(index_path, 4096), ": does not list ", unlisted.size(),
                         " tensors that are in its files: ", list_some(unlisted)));
}

const TensorEntry* Checkpoint::find(std::string_view name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : it->second;
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : index_) names.emplace_back(name);
  return names;
}

int64_t Checkpoint::nbytes() const {
  int64_t n = 0;
  for (const auto& [name, entry] : index_) n += entry->nbytes;
  return n;
}

}  // namespace tiny_vllm
