#include "model/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <unordered_set>

#include "base/error.h"
#include "base/printable.h"
#include "model/json_reader.h"

namespace tiny_vllm {
namespace {

constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr size_t kMaxTensors = 1 << 18;           // in one file; the largest models have some 100,000 in all
constexpr size_t kMaxDims = 16;

struct DTypeInfo {
  const char* name;
  int64_t bits;
};

// All that the format knows. The engine computes with the first three; the others may be in a file, unused.
constexpr std::array kDTypes = {
    DTypeInfo{"BF16", 16},   DTypeInfo{"F16", 16},        DTypeInfo{"F32", 32},        DTypeInfo{"F64", 64},
    DTypeInfo{"C64", 64},    DTypeInfo{"I64", 64},        DTypeInfo{"I32", 32},        DTypeInfo{"I16", 16},
    DTypeInfo{"I8", 8},      DTypeInfo{"U64", 64},        DTypeInfo{"U32", 32},        DTypeInfo{"U16", 16},
    DTypeInfo{"U8", 8},      DTypeInfo{"BOOL", 8},        DTypeInfo{"F8_E4M3", 8},     DTypeInfo{"F8_E5M2", 8},
    DTypeInfo{"F8_E8M0", 8}, DTypeInfo{"F8_E4M3FNUZ", 8}, DTypeInfo{"F8_E5M2FNUZ", 8}, DTypeInfo{"F6_E2M3", 6},
    DTypeInfo{"F6_E3M2", 6}, DTypeInfo{"F4", 4}};
constexpr std::array kSupported = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};

// What the header says of one tensor, before it is compared with the file.
struct Declared {
  TensorEntry entry;
  int64_t bits = 0;  // of one element
  int64_t begin = 0;
  int64_t end = 0;
};

// {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {"key": "text"}}
class HeaderReader final : public JsonReader {
 public:
  explicit HeaderReader(const std::string& file) : file_(file) {}

  std::vector<Declared> take() { return std::move(tensors_); }

  bool start_object(size_t) override {
    if (place_ == Place::kStart) return go(Place::kTop);
    if (place_ != Place::kTop) return unexpected("an object");
    if (name_ == "__metadata__") return go(Place::kMetadata);
    if (tensors_.size() == kMaxTensors) refuse(str("more than ", kMaxTensors, " tensors in one file"));
    tensors_.emplace_back();
    tensors_.back().entry.name = name_;
    seen_ = {};
    return go(Place::kTensor);
  }

  bool key(string_t& text) override {
    if (place_ == Place::kTop) {
      if (!names_.insert(text).second) refuse(str("the name '", printable(text), "' appears twice in the header"));
      name_ = text;
    } else if (place_ == Place::kTensor) {
      const auto field = std::find(kFields.begin(), kFields.end(), text);
      if (field == kFields.end()) refuse(str(tensor(), ": unknown field '", printable(text), "'"));
      field_ = static_cast<size_t>(field - kFields.begin());
      if (seen_[field_]) refuse(str(tensor(), ": field '", text, "' appears twice"));
      seen_[field_] = true;
    }
    return true;
  }

  bool string(string_t& text) override {
    if (place_ == Place::kMetadata) return true;
    if (place_ != Place::kTensor || field_ != kDtype) return unexpected("a string");
    const auto info = std::find_if(kDTypes.begin(), kDTypes.end(), [&](const DTypeInfo& d) { return d.name == text; });
    if (info == kDTypes.end()) refuse(str(tensor(), ": unknown dtype '", printable(text), "'"));
    const auto i = static_cast<size_t>(info - kDTypes.begin());
    TensorEntry& entry = tensors_.back().entry;
    entry.dtype_name = text;
    entry.supported = i < kSupported.size();
    if (entry.supported) entry.dtype = kSupported[i];
    tensors_.back().bits = info->bits;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != Place::kTensor || field_ == kDtype) return unexpected("a list");
    return go(Place::kList);
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::kList) return unexpected("a number");
    if (value > static_cast<uint64_t>(INT64_MAX)) return unexpected("a number above 2^63 - 1");
    std::vector<int64_t>& list = field_ == kShape ? tensors_.back().entry.shape : offsets_;
    if (list.size() == (field_ == kShape ? kMaxDims : 2))
      refuse(str(tensor(), ": ", kFields[field_], " has more than ", list.size(), " numbers"));
    list.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool end_array() override {
    if (field_ == kOffsets) {
      if (offsets_.size() != 2) refuse(str(tensor(), ": data_offsets must be two numbers: begin and end"));
      tensors_.back().begin = offsets_[0];
      tensors_.back().end = offsets_[1];
      offsets_.clear();
    }
    return go(Place::kTensor);
  }

  bool end_object() override {
    if (place_ == Place::kTop) return go(Place::kEnd);
    if (place_ == Place::kTensor) {
      for (size_t f = 0; f < kFields.size(); ++f)
        if (!seen_[f]) refuse(str(tensor(), ": field '", kFields[f], "' is missing"));
    }
    return go(Place::kTop);
  }

  [[noreturn]] void throw_invalid(int64_t position) const override {
    refuse(str("the header is not valid JSON at its byte ", position, ": a damaged or unfinished file?"));
  }

 private:
  enum class Place : uint8_t { kStart, kTop, kMetadata, kTensor, kList, kEnd };
  static constexpr std::array<std::string_view, 3> kFields = {"dtype", "shape", "data_offsets"};
  enum Field : size_t { kDtype, kShape, kOffsets };

  bool go(Place place) {
    place_ = place;
    return true;
  }

  std::string tensor() const { return str("tensor '", printable(name_), "'"); }

  [[noreturn]] void refuse(const std::string& why) const {
    throw ModelLoadError(str(printable(file_, 4096), ": ", why));
  }

  bool unexpected(const char* found) const override {
    switch (place_) {
      case Place::kMetadata:
        refuse(str("__metadata__ must map texts to texts, found ", found));
      case Place::kTensor:
        refuse(str(tensor(), ": ", kFields[field_], " must be ", field_ == kDtype ? "a string" : "a list of integers",
                   ", found ", found));
      case Place::kList:
        refuse(str(tensor(), ": ", kFields[field_], " must hold integers from 0, found ", found));
      case Place::kTop:
        refuse(str(tensor(), " must be an object with dtype, shape and data_offsets, found ", found));
      case Place::kStart:
      case Place::kEnd:
        break;
    }
    refuse(str("the header must be a JSON object, found ", found));
  }

  const std::string& file_;
  Place place_ = Place::kStart;
  std::string name_;
  size_t field_ = 0;
  std::array<bool, 3> seen_{};
  std::vector<int64_t> offsets_;
  std::vector<Declared> tensors_;
  std::unordered_set<std::string> names_;
};

// A download that went wrong often leaves a readable reason in the file's place.
std::string what_else_it_is(std::string_view text) {
  if (text.starts_with("version https://git-lfs"))
    return "is a Git LFS pointer, not the weights themselves: run `git lfs pull` in the folder, or download it again";
  if (text.starts_with("GGUF")) return "is a GGUF file, not safetensors";
  if (text.starts_with("PK\x03\x04")) return "is a zip archive (a PyTorch checkpoint?), not safetensors";
  const size_t start = text.find_first_not_of(" \t\r\n");
  if (start == std::string_view::npos) return "";
  std::string head(text.substr(start, 64));
  std::transform(head.begin(), head.end(), head.begin(), [](unsigned char c) { return std::tolower(c); });
  if (head.starts_with("<!doctype") || head.starts_with("<html") || head.starts_with("<?xml"))
    return "is a web page, not the weights: the download was answered by an error or login page";
  return "";
}

// Product of the shape and of the element size in bytes; false when it does not fit, or ends within a byte.
bool size_in_bytes(const Declared& tensor, int64_t* nbytes) {
  int64_t bits = tensor.bits;
  for (int64_t d : tensor.entry.shape)
    if (__builtin_mul_overflow(bits, d, &bits)) return false;
  *nbytes = bits / 8;
  return bits % 8 == 0;
}

}  // namespace

int64_t TensorEntry::numel() const {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  SafetensorsFile file;
  file.file_ = MappedFile::open(path);
  file.read(file.file_.bytes(), path);
  return file;
}

SafetensorsFile SafetensorsFile::from_bytes(std::span<const std::byte> bytes, const std::string& name) {
  SafetensorsFile file;
  file.read(bytes, name);
  return file;
}

void SafetensorsFile::read(std::span<const std::byte> bytes, const std::string& name) {
  path_ = name;
  const auto refuse = [&](const std::string& why) { throw ModelLoadError(str(printable(path_, 4096), ": ", why)); };
  const auto size = static_cast<int64_t>(bytes.size());
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());

  const auto refuse_header = [&](const std::string& why) {
    const std::string other = what_else_it_is(text.substr(0, 256));
    refuse(other.empty() ? why : other);
  };
  if (size < 8) refuse_header(str("has ", size, " bytes; a safetensors file has at least 8"));
  uint64_t header_size = 0;
  for (int i = 7; i >= 0; --i) header_size = header_size << 8 | static_cast<uint64_t>(bytes[i]);
  if (header_size > static_cast<uint64_t>(kMaxHeaderBytes))
    refuse_header(str("is not a safetensors file: it announces a header of ", header_size,
                      " bytes, and the format allows ", kMaxHeaderBytes));
  const auto header_end = 8 + static_cast<int64_t>(header_size);
  if (header_end > size)
    refuse_header(
        str("is cut short: the header should end at byte ", header_end, ", but the file has ", size, " bytes"));
  const std::string_view header = text.substr(8, header_size);
  if (!header.starts_with('{')) refuse_header("is not a safetensors file: its header does not begin with '{'");

  HeaderReader reader(path_);
  read_json(header, reader);
  std::vector<Declared> declared = reader.take();

  // The tensors in the order of their bytes must follow each other without a hole and without an overlap. An empty
  // tensor may lie at any border.
  std::sort(declared.begin(), declared.end(), [](const Declared& a, const Declared& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  int64_t offset = 0;
  for (const Declared& d : declared) {
    const std::string tensor = str("tensor '", printable(d.entry.name), "'");
    int64_t nbytes = 0;
    if (!size_in_bytes(d, &nbytes))
      refuse(
          str(tensor, ": its shape is impossible: too large, or not a whole number of bytes of ", d.entry.dtype_name));
    if (d.end < d.begin || d.end - d.begin != nbytes)
      refuse(str(tensor, ": shape and dtype need ", nbytes, " bytes, data_offsets [", d.begin, ", ", d.end, "] give ",
                 d.end - d.begin));
    if (d.begin != offset)
      refuse(str(tensor, ": begins at byte ", d.begin, " of the data, but the tensors before it end at ", offset,
                 d.begin < offset ? ": they overlap" : ": there is a hole"));
    offset = d.end;
  }
  if (offset != size - header_end)
    refuse(str(offset > size - header_end ? "is cut short" : "has bytes after its last tensor", ": expected ",
               static_cast<uint64_t>(header_end) + static_cast<uint64_t>(offset), " bytes, found ", size,
               offset > size - header_end ? ": an unfinished download?" : ""));

  tensors_.reserve(declared.size());
  for (Declared& d : declared) {
    d.entry.data = bytes.data() + header_end + d.begin;
    d.entry.nbytes = d.end - d.begin;
    d.entry.file = path_;
    tensors_.push_back(std::move(d.entry));
  }
  for (size_t i = 0; i < tensors_.size(); ++i) index_.emplace(tensors_[i].name, i);
}

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &tensors_[it->second];
}

namespace {

static_assert(std::endian::native == std::endian::little, "safetensors is little-endian, and so is this reader");

template <typename Bits>
Bits load(const std::byte* from, int64_t i) {
  Bits bits;
  std::memcpy(&bits, from + i * static_cast<int64_t>(sizeof(Bits)), sizeof(Bits));
  return bits;
}

// float16 has only 65,536 numbers: looking them up is faster than taking them apart.
const std::vector<float>& half_table() {
  static const std::vector<float> table = [] {
    std::vector<float> t(65536);
    for (size_t bits = 0; bits < t.size(); ++bits) t[bits] = half_to_float(static_cast<uint16_t>(bits));
    return t;
  }();
  return table;
}

template <typename Out>
void convert(const std::byte* from, DType from_type, int64_t count, Out* out) {
  switch (from_type) {
    case DType::kBFloat16:
      for (int64_t i = 0; i < count; ++i) out[i] = from_float<Out>(to_float(bfloat16{load<uint16_t>(from, i)}));
      break;
    case DType::kFloat16: {
      const float* table = half_table().data();
      for (int64_t i = 0; i < count; ++i) out[i] = from_float<Out>(table[load<uint16_t>(from, i)]);
      break;
    }
    case DType::kFloat32:
      for (int64_t i = 0; i < count; ++i) out[i] = from_float<Out>(std::bit_cast<float>(load<uint32_t>(from, i)));
      break;
  }
}

}  // namespace

void convert_to(const TensorEntry& tensor, int64_t first, int64_t count, DType dst, void* out) {
  TV_CHECK(tensor.supported, "tensor ", tensor.name, " has dtype ", tensor.dtype_name);
  TV_CHECK(dst != DType::kFloat16, "weights are converted to bfloat16 or float32");
  TV_CHECK(first >= 0 && count >= 0 && first <= tensor.numel() && count <= tensor.numel() - first, "elements ", first,
           "+", count, " of ", tensor.numel());
  const std::byte* from = tensor.data + first * size_of(tensor.dtype);
  if (tensor.dtype == dst) {
    if (count > 0) std::memcpy(out, from, static_cast<size_t>(count * size_of(dst)));
  } else if (dst == DType::kFloat32) {
    convert(from, tensor.dtype, count, static_cast<float*>(out));
  } else {
    convert(from, tensor.dtype, count, static_cast<bfloat16*>(out));
  }
}

void convert_to(const TensorEntry& tensor, DType dst, void* out) { convert_to(tensor, 0, tensor.numel(), dst, out); }

}  // namespace tiny_vllm
