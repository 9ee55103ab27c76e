// A small JSON file as a tree, and its fields read one by one, each checked for its type and range.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tiny_vllm {

// Throws ModelLoadError, with the line and column where that helps: not JSON, not an object, nested too deep, too long,
// a field twice. `source` names the file.
nlohmann::json parse_json_object(const std::string& text, const std::string& source);

// One object of the file. A field that is null counts as absent. Every error is a ModelLoadError that names the field.
class Fields {
 public:
  using json = nlohmann::json;

  // `prefix` stands before the names of fields in messages: "rope_scaling.".
  Fields(const json& object, std::string source, std::string prefix)
      : object_(object), source_(std::move(source)), prefix_(std::move(prefix)) {}
  Fields inner(const json& object, std::string prefix) const { return {object, source_, std::move(prefix)}; }

  [[noreturn]] void refuse(const std::string& why) const;
  std::string name(std::string_view key) const;

  const json& object() const { return object_; }
  bool has_key(const char* key) const { return object_.contains(key); }  // also when it is null
  const json* find(const char* key) const;                               // nullptr: absent

  std::optional<int64_t> integer(const char* key, int64_t least, int64_t most) const;
  int64_t required_integer(const char* key, int64_t most) const;  // from 1
  // In (above, most], or in [above, most] when `inclusive`.
  std::optional<double> number(const char* key, double above, double most, bool inclusive = false) const;
  std::optional<bool> boolean(const char* key) const;
  std::optional<std::string> text(const char* key) const;
  std::optional<std::vector<std::string>> texts(const char* key) const;
  const json* object_field(const char* key) const;  // nullptr: absent or empty

 private:
  [[noreturn]] void wrong_type(const char* key, const char* expected, const json& found) const;

  const json& object_;
  std::string source_;
  std::string prefix_;
};

}  // namespace tiny_vllm
