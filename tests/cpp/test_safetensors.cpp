// The reader against files that are wrong in every way we could think of. Run it under AddressSanitizer as well:
// bytes are handed over in a buffer of their exact size, so that a read past the end is seen.
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <vector>

#include "base/error.h"
#include "base/printable.h"
#include "check.h"
#include "model/safetensors.h"

namespace tiny_vllm {
namespace {

std::string length_bytes(uint64_t n) {
  std::string s;
  for (int i = 0; i < 8; ++i) s += static_cast<char>(n >> (8 * i));
  return s;
}

std::string make_file(const std::string& header, size_t data_bytes) {
  return length_bytes(header.size()) + header + std::string(data_bytes, '\x11');
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape, int64_t begin,
                  int64_t end) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":[" +
         std::to_string(begin) + "," + std::to_string(end) + "]}";
}

// On the heap, with no slack for a stray read to hide in.
std::vector<std::byte> copy_of(const std::string& bytes) {
  const auto* begin = reinterpret_cast<const std::byte*>(bytes.data());
  return std::vector<std::byte>(begin, begin + bytes.size());
}

// Opens the bytes and reads all that the reader offers.
int64_t read_all(const std::string& bytes) {
  const std::vector<std::byte> exact = copy_of(bytes);
  const SafetensorsFile file = SafetensorsFile::from_bytes(exact, "weights.safetensors");
  int64_t sum = 0;
  for (const TensorEntry& tensor : file.tensors())
    for (int64_t i = 0; i < tensor.nbytes; ++i) sum += static_cast<int64_t>(tensor.data[i]);
  return sum;
}

void refused(const std::string& bytes, const std::string& part) {
  CHECK_THROWS(ModelLoadError, part, read_all(bytes));
  CHECK_THROWS(ModelLoadError, "weights.safetensors", read_all(bytes));
}

void refused_header(const std::string& header, const std::string& part, size_t data_bytes = 0) {
  refused(make_file(header, data_bytes), part);
}

std::filesystem::path temporary_folder() {
  std::string name = (std::filesystem::temp_directory_path() / "tiny_vllm_XXXXXX").string();
  CHECK(::mkdtemp(name.data()) != nullptr);
  return name;
}

TEST(reads_a_good_file) {
  const std::string header = "{\"__metadata__\":{\"format\":\"pt\"}," + entry("b", "BF16", "[2,3]", 8, 20) + "," +
                             entry("a", "F32", "[2]", 0, 8) + "," + entry("scalar", "F16", "[]", 20, 22) + "}  ";
  std::string bytes = make_file(header, 22);
  const std::vector<std::byte> copy = copy_of(bytes);
  const SafetensorsFile file = SafetensorsFile::from_bytes(copy, "weights.safetensors");
  CHECK_EQ(file.tensors().size(), size_t{3});
  CHECK_EQ(file.tensors()[0].name, "a");  // in the order of their bytes
  const TensorEntry* b = file.find("b");
  CHECK(b != nullptr && b->supported && b->dtype == DType::kBFloat16);
  CHECK_EQ(b->dtype_name, "BF16");
  CHECK(b->shape == std::vector<int64_t>{2, 3});
  CHECK_EQ(b->nbytes, 12);
  CHECK_EQ(b->numel(), 6);
  CHECK(b->data == copy.data() + 8 + header.size() + 8);
  CHECK_EQ(file.find("scalar")->numel(), 1);
  CHECK(file.find("c") == nullptr);
}

TEST(an_empty_file_of_tensors_is_fine) {
  CHECK_EQ(read_all(make_file("{}", 0)), 0);
  CHECK_EQ(read_all(make_file("{\"__metadata__\":{}}", 0)), 0);
}

TEST(empty_tensors_may_lie_at_any_border) {
  const std::string header = "{" + entry("z1", "F32", "[0,5]", 4, 4) + "," + entry("a", "F32", "[1]", 0, 4) + "," +
                             entry("z0", "F32", "[0]", 0, 0) + "," + entry("b", "F32", "[1]", 4, 8) + "," +
                             entry("z2", "F32", "[3,0]", 8, 8) + "}";
  CHECK_EQ(read_all(make_file(header, 8)), 8 * 0x11);
  refused_header("{" + entry("a", "F32", "[1]", 0, 4) + "," + entry("z", "F32", "[0]", 2, 2) + "}", "tensor 'z'", 4);
}

TEST(every_cut_of_a_good_file_is_refused) {
  const std::string good =
      make_file("{" + entry("a", "F32", "[2]", 0, 8) + "," + entry("b", "F16", "[3]", 8, 14) + "}", 14);
  CHECK_EQ(read_all(good), 14 * 0x11);
  for (size_t length = 0; length < good.size(); ++length) refused(good.substr(0, length), "");
  for (size_t more = 1; more <= 10; ++more)
    refused(good + std::string(more, '\0'), str("expected ", good.size(), " bytes, found ", good.size() + more));
  refused(good.substr(0, good.size() - 1), str("expected ", good.size(), " bytes, found ", good.size() - 1));
}

TEST(every_changed_byte_is_refused_or_read_safely) {
  const std::string good =
      make_file("{" + entry("a", "F32", "[2]", 0, 8) + "," + entry("b", "F16", "[3]", 8, 14) + "}", 14);
  int refusals = 0;
  for (size_t i = 0; i < good.size() - 14; ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string bytes = good;
      bytes[i] = static_cast<char>(bytes[i] ^ (1 << bit));
      try {
        read_all(bytes);
      } catch (const ModelLoadError&) {
        ++refusals;
      }
    }
  }
  CHECK(refusals > 500);
}

TEST(header_length_as_a_weapon) {
  const std::string good = make_file("{" + entry("a", "F32", "[2]", 0, 8) + "}", 8);
  const uint64_t size = good.size();
  for (uint64_t length : {uint64_t{0}, uint64_t{1}, uint64_t{7}, size, size - 7, uint64_t{100'000'000},
                          uint64_t{100'000'001}, uint64_t{1} << 31, uint64_t{1} << 32, uint64_t{1} << 63, ~uint64_t{0},
                          ~uint64_t{4}, ~uint64_t{7}, ~uint64_t{8}})
    refused(length_bytes(length) + good.substr(8), "");
  refused(length_bytes(uint64_t{1} << 63) + good.substr(8), "announces a header of 9223372036854775808 bytes");
  refused(length_bytes(100'000'000) + good.substr(8), "cut short");
  refused("", "0 bytes");
  refused("1234567", "7 bytes");
}

TEST(headers_that_are_no_header) {
  refused_header("not JSON", "does not begin with '{'");
  refused_header("[]", "does not begin with '{'");
  refused_header(" {}", "does not begin with '{'");
  refused_header("\xef\xbb\xbf{}", "does not begin with '{'");
  refused_header("{", "not valid JSON");
  refused_header("{} x", "not valid JSON");
  refused_header("{}{}", "not valid JSON");
  refused_header("{\"a\":}", "not valid JSON at its byte 6");
  refused_header("{\"\xff\xfe\":{}}", "not valid JSON");
  refused_header("{\"\\ud800\":{}}", "not valid JSON");
  refused_header(std::string("{}\0\0", 4), "not valid JSON at its byte 3");  // what hides behind a NUL byte
  refused_header("{\"a\":1e999}", "not valid JSON");
}

TEST(nesting_is_refused_at_once) {
  const std::string deep(10'000, '[');
  refused_header("{\"a\":" + deep, "tensor 'a' must be an object");
  refused_header("{\"a\":{\"shape\":" + deep, "shape must hold integers");
  refused_header("{\"__metadata__\":" + deep, "must be an object");
  refused_header("{\"__metadata__\":{\"k\":" + deep, "must map texts to texts");
  std::string objects;
  for (int i = 0; i < 10'000; ++i) objects += "{\"a\":";
  refused_header(objects, "unknown field 'a'");
}

TEST(entries_of_the_wrong_form) {
  const auto one = [](const std::string& body) { return "{\"a\":" + body + "}"; };
  refused_header(one("1"), "tensor 'a' must be an object");
  refused_header(one("null"), "tensor 'a' must be an object");
  refused_header(one("{}"), "tensor 'a': field 'dtype' is missing");
  refused_header(one(R"({"dtype":"F32","shape":[1]})"), "field 'data_offsets' is missing");
  refused_header(one(R"({"dtype":"F32","data_offsets":[0,4]})"), "field 'shape' is missing");
  refused_header(one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1})"), "unknown field 'x'");
  refused_header(one(R"({"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]})"), "'dtype' appears twice");
  refused_header(one(R"({"dtype":32,"shape":[1],"data_offsets":[0,4]})"), "dtype must be a string");
  refused_header(one(R"({"dtype":"F33","shape":[1],"data_offsets":[0,4]})"), "unknown dtype 'F33'");
  refused_header(one(R"({"dtype":"f32","shape":[1],"data_offsets":[0,4]})"), "unknown dtype 'f32'");
  refused_header(one(R"({"dtype":"F32","shape":4,"data_offsets":[0,4]})"), "shape must be a list");
  refused_header(one(R"({"dtype":"F32","shape":{"x":1},"data_offsets":[0,4]})"), "shape must be a list");
  refused_header(one(R"({"dtype":"F32","shape":["1"],"data_offsets":[0,4]})"), "shape must hold integers");
  refused_header(one(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})"), "found a negative number");
  refused_header(one(R"({"dtype":"F32","shape":[1.0],"data_offsets":[0,4]})"), "not an integer");
  refused_header(one(R"({"dtype":"F32","shape":[true],"data_offsets":[0,4]})"), "shape must hold integers");
  refused_header(one(R"({"dtype":"F32","shape":[1,[2]],"data_offsets":[0,4]})"), "shape must hold integers");
  refused_header(one(R"({"dtype":"F32","shape":[1],"data_offsets":[0]})"), "two numbers");
  refused_header(one(R"({"dtype":"F32","shape":[1],"data_offsets":[]})"), "two numbers");
  refused_header(one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4,8]})"), "more than 2 numbers");
  refused_header(one(R"({"dtype":"F32","shape":[1],"data_offsets":[-4,0]})"), "data_offsets must hold integers");
  refused_header(one(R"({"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4]})"), "above 2^63 - 1");
  refused_header(one(R"({"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4]})"), "not an integer");
  refused_header(one(R"({"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]})"),
                 "more than 16 numbers");
  refused_header("{\"__metadata__\":{\"k\":1}}", "__metadata__ must map texts to texts");
  refused_header("{\"__metadata__\":{},\"__metadata__\":{}}", "appears twice");
}

TEST(names_must_differ) {
  refused_header("{" + entry("a", "F32", "[1]", 0, 4) + "," + entry("a", "F32", "[1]", 4, 8) + "}",
                 "the name 'a' appears twice", 8);
  refused_header("{" + entry("a", "F32", "[1]", 0, 4) + "," + entry("\\u0061", "F32", "[1]", 4, 8) + "}",
                 "the name 'a' appears twice", 8);
}

TEST(sizes_must_agree_and_must_not_overflow) {
  const auto one = [](const std::string& dtype, const std::string& shape, int64_t begin, int64_t end) {
    return "{" + entry("a", dtype, shape, begin, end) + "}";
  };
  refused_header(one("F32", "[3]", 0, 8), "tensor 'a': shape and dtype need 12 bytes, data_offsets [0, 8] give 8", 8);
  refused_header(one("F32", "[1]", 0, 8), "need 4 bytes", 8);
  refused_header(one("F32", "[1]", 4, 0), "give -4", 4);
  refused_header(one("F32", "[4294967296,4294967296]", 0, 0), "impossible");
  refused_header(one("F32", "[9223372036854775807]", 0, 0), "impossible");
  refused_header(one("F32", "[2305843009213693952]", 0, 0), "impossible");    // 2^61 floats: 2^63 bytes
  refused_header(one("F32", "[4611686018427387905,4]", 0, 4), "impossible");  // wraps to 4 elements
  refused_header(one("F32", "[2]", INT64_MAX - 8, INT64_MAX), "hole", 8);
  refused_header(one("F64", "[288230376151711743]", 0, 2305843009213693944), "impossible");
  refused_header(one("U8", "[1152921504606846975]", 0, 1152921504606846975), "cut short");
  refused_header(one("F4", "[3]", 0, 1), "impossible", 1);  // a byte and a half
  CHECK_EQ(read_all(make_file(one("F4", "[4]", 0, 2), 2)), 2 * 0x11);
}

TEST(tensors_must_tile_the_data) {
  const auto two = [](int64_t b0, int64_t e0, int64_t b1, int64_t e1) {
    return "{" + entry("a", "U8", "[" + std::to_string(e0 - b0) + "]", b0, e0) + "," +
           entry("b", "U8", "[" + std::to_string(e1 - b1) + "]", b1, e1) + "}";
  };
  CHECK_EQ(read_all(make_file(two(0, 4, 4, 8), 8)), 8 * 0x11);
  CHECK_EQ(read_all(make_file(two(4, 8, 0, 4), 8)), 8 * 0x11);
  refused_header(two(0, 4, 5, 8), "tensor 'b': begins at byte 5 of the data, but the tensors before it end at 4", 8);
  refused_header(two(0, 4, 3, 8), "overlap", 8);
  refused_header(two(0, 8, 0, 8), "overlap", 8);
  refused_header(two(0, 8, 2, 4), "overlap", 8);
  refused_header(two(1, 4, 4, 8), "hole", 8);
  refused_header(two(0, 4, 4, 8), "cut short", 7);
  refused_header(two(0, 4, 4, 8), "bytes after its last tensor", 9);
}

TEST(other_dtypes_are_listed_but_cannot_be_converted) {
  const std::string bytes = make_file("{" + entry("ids", "I64", "[2]", 0, 16) + "}", 16);
  const std::vector<std::byte> copy = copy_of(bytes);
  const SafetensorsFile file = SafetensorsFile::from_bytes(copy, "weights.safetensors");
  CHECK(!file.find("ids")->supported);
  CHECK_EQ(file.find("ids")->dtype_name, "I64");
  float out[2];
  CHECK_THROWS(InternalError, "I64", convert_to(*file.find("ids"), DType::kFloat32, out));
}

TEST(what_a_failed_download_leaves_is_named) {
  refused("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer");
  refused("<!DOCTYPE html><html><body>Sign in</body></html>", "web page");
  refused("\n  <HTML>", "web page");
  refused("GGUF\x03" + std::string(30, '\0'), "GGUF");
  refused("PK\x03\x04" + std::string(30, '\0'), "zip archive");
}

TEST(names_in_messages_are_short_and_printable) {
  const std::string name(100'000, 'n');
  try {
    read_all(make_file("{" + entry(name, "F33", "[1]", 0, 4) + "}", 4));
    CHECK(false);
  } catch (const ModelLoadError& e) {
    CHECK(std::strlen(e.what()) < 400);
  }
  refused_header("{\"a\\u0000\\n\":1}", "tensor 'a\\x00\\x0a'");
  CHECK_EQ(printable("\xc3\xa9\xff\xed\xa0\x80\xf0\x9f\x98\x80"), "\xc3\xa9\\xff\\xed\\xa0\\x80\xf0\x9f\x98\x80");
  CHECK_EQ(printable("\xc0\x80\xf4\x90\x80\x80\x7f"), "\\xc0\\x80\\xf4\\x90\\x80\\x80\\x7f");
  CHECK_EQ(printable("abc\xc3\xa9", 4), "abc...");
  CHECK_EQ(printable("ab\xc3", 100), "ab\\xc3");
}

TEST(too_many_tensors_in_one_file) {
  std::string header = "{";
  for (int i = 0; i <= 1 << 18; ++i) header += (i ? "," : "") + entry(std::to_string(i), "F32", "[0]", 0, 0);
  refused_header(header + "}", "more than 262144 tensors");
}

TEST(conversion_rounds_to_nearest_even) {
  // 1 + 2^-8 is half way between two bfloat16 numbers and goes to the even one; a hair more goes up.
  const std::vector<float> values = {1.0f,         1.00390625f,   1.00390637f, 1.01171875f,
                                     -0.0f,        3.4028235e38f, 1e-45f,      std::numeric_limits<float>::infinity(),
                                     std::nanf("")};
  std::string bytes = make_file("{" + entry("a", "F32", "[9]", 0, 36) + " }", 36);  // odd header: data is unaligned
  std::memcpy(bytes.data() + bytes.size() - 36, values.data(), 36);
  const std::vector<std::byte> copy = copy_of(bytes);
  const SafetensorsFile file = SafetensorsFile::from_bytes(copy, "weights.safetensors");
  std::vector<uint16_t> out(9, 0x7fc1);
  convert_to(*file.find("a"), DType::kBFloat16, out.data());
  CHECK(out == (std::vector<uint16_t>{0x3f80, 0x3f80, 0x3f81, 0x3f82, 0x8000, 0x7f80, 0x0000, 0x7f80, 0x7fc0}));
  std::vector<float> exact(9, 7.0f);
  convert_to(*file.find("a"), DType::kFloat32, exact.data());
  CHECK(std::memcmp(exact.data(), values.data(), 36) == 0);
  std::vector<float> part(3, 7.0f);  // elements 1 and 2 only
  convert_to(*file.find("a"), 1, 2, DType::kFloat32, part.data());
  CHECK(part == (std::vector<float>{1.00390625f, 1.00390637f, 7.0f}));
  CHECK_THROWS(InternalError, "elements", convert_to(*file.find("a"), 8, 2, DType::kFloat32, part.data()));
  CHECK_THROWS(InternalError, "elements", convert_to(*file.find("a"), 10, 0, DType::kFloat32, part.data()));
  CHECK_THROWS(InternalError, "elements", convert_to(*file.find("a"), 1, INT64_MAX, DType::kFloat32, part.data()));
}

TEST(float16_is_converted_exactly) {
  const std::vector<uint16_t> halves = {0x3c00, 0x0001, 0x03ff, 0x0400, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x8000, 0x3555};
  const std::vector<float> wanted = {1.0f,      0x1p-24f, 1023 * 0x1p-24f, 0x1p-14f, 65504.0f,
                                     -65504.0f, INFINITY, -INFINITY,       -0.0f,    0x1.554p-2f};
  std::string bytes = make_file("{" + entry("a", "F16", "[10]", 0, 20) + "}", 20);
  std::memcpy(bytes.data() + bytes.size() - 20, halves.data(), 20);
  const std::vector<std::byte> copy = copy_of(bytes);
  const SafetensorsFile file = SafetensorsFile::from_bytes(copy, "weights.safetensors");
  std::vector<float> out(10, 7.0f);
  convert_to(*file.find("a"), DType::kFloat32, out.data());
  CHECK(std::memcmp(out.data(), wanted.data(), 40) == 0);
  std::vector<uint16_t> rounded(10, 0x7fc1);
  convert_to(*file.find("a"), DType::kBFloat16, rounded.data());
  for (size_t i = 0; i < 10; ++i) CHECK_EQ(rounded[i], to_bfloat16(wanted[i]).bits);
}

TEST(files_that_cannot_be_mapped) {
  const std::filesystem::path folder = temporary_folder();
  CHECK_THROWS(ModelLoadError, "nothing.safetensors: cannot open",
               SafetensorsFile::open(folder / "nothing.safetensors"));
  CHECK_THROWS(ModelLoadError, "is a directory", SafetensorsFile::open(folder));
  std::ofstream(folder / "empty.safetensors").close();
  CHECK_THROWS(ModelLoadError, "is empty", SafetensorsFile::open(folder / "empty.safetensors"));
  CHECK_THROWS(ModelLoadError, "not a plain file", SafetensorsFile::open("/dev/null"));
  CHECK_THROWS(ModelLoadError, "NUL", SafetensorsFile::open(std::string("a\0b", 3)));
  std::filesystem::remove_all(folder);
}

TEST(tensors_beyond_four_gigabytes_are_found) {
  // A file with a hole: 4 GiB that take no disk space, then a tensor with something in it.
  const std::filesystem::path path = temporary_folder() / "large.safetensors";
  const int64_t big = (int64_t{1} << 32) + 6;
  const std::string header = "{" + entry("zeros", "BF16", "[" + std::to_string(big / 2) + "]", 0, big) + "," +
                             entry("last", "F32", "[2]", big, big + 8) + "}";
  const float values[2] = {1.5f, -2.5f};
  {
    std::ofstream out(path, std::ios::binary);
    out << length_bytes(header.size()) << header;
    out.seekp(static_cast<std::streamoff>(big), std::ios::cur);
    out.write(reinterpret_cast<const char*>(values), sizeof values);
    CHECK(out.good());
  }
  {
    SafetensorsFile moved = SafetensorsFile::open(path);
    const SafetensorsFile file = std::move(moved);
    float out[2] = {7, 7};
    convert_to(*file.find("last"), DType::kFloat32, out);
    CHECK(std::memcmp(out, values, sizeof out) == 0);
    const TensorEntry& zeros = *file.find("zeros");
    CHECK_EQ(zeros.numel(), big / 2);
    convert_to(zeros, big / 2 - 2, 2, DType::kFloat32, out);
    CHECK(out[0] == 0 && out[1] == 0);
    advise(zeros.data, 4096, Advice::kSequential);
    advise(file.find("last")->data, 8, Advice::kWillNeed);
  }
  std::filesystem::remove_all(path.parent_path());
}

}  // namespace
}  // namespace tiny_vllm
