// Reading JSON of known form without building a tree of it: each event is checked as it comes.
//
// A file that is wrong, or made to do harm, is refused at the first token that does not fit, so it costs neither
// memory nor stack: nesting is bounded by what the reader expects, not by the file.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace tiny_vllm {

// Whatever a reader does not override is refused by unexpected(), which throws.
class JsonReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("true or false"); }
  bool number_integer(number_integer_t) override { return unexpected("a negative number"); }
  bool number_unsigned(number_unsigned_t) override { return unexpected("a number"); }
  bool number_float(number_float_t, const string_t&) override { return unexpected("a number that is not an integer"); }
  bool string(string_t&) override { return unexpected("a string"); }
  bool binary(binary_t&) override { return unexpected("binary data"); }
  bool start_object(size_t) override { return unexpected("an object"); }
  bool key(string_t&) override { return unexpected("a key"); }
  bool end_object() override { return unexpected("the end of an object"); }
  bool start_array(size_t) override { return unexpected("a list"); }
  bool end_array() override { return unexpected("the end of a list"); }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    throw_invalid(static_cast<int64_t>(position));
    return false;  // never reached
  }

  [[noreturn]] virtual void throw_invalid(int64_t position) const = 0;  // not JSON; position counts bytes from 1

 protected:
  virtual bool unexpected(const char* found) const = 0;  // JSON, but not what this file must hold; throws
};

inline void read_json(std::string_view text, JsonReader& reader) {
  // The parser takes a NUL byte for the end of the text and would not see what follows it.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos)
    reader.throw_invalid(static_cast<int64_t>(nul) + 1);
  nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
}

}  // namespace tiny_vllm
