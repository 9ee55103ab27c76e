#include "model/json_fields.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "base/printable.h"

namespace tiny_vllm {

using nlohmann::json;

json parse_json_object(const std::string& text, const std::string& source) {
  constexpr size_t kMaxBytes = 8'000'000;  // real ones have some thousand
  constexpr size_t kMaxDepth = 32;
  const auto refuse = [&](const std::string& why) { throw ModelLoadError(str(printable(source, 4096), ": ", why)); };
  const auto invalid = [&](size_t byte) {  // counted from 1
    const std::string_view before = std::string_view(text).substr(0, std::max<size_t>(byte, 1) - 1);
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const size_t line_start = before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
    refuse(str("is not valid JSON: line ", line, ", column ", before.size() - line_start + 1));
  };
  if (text.size() > kMaxBytes) refuse(str("has ", text.size(), " bytes; at most ", kMaxBytes, " are read"));
  // The parser takes a NUL byte for the end of the text and would not see what follows it.
  if (const size_t nul = text.find('\0'); nul != std::string::npos) invalid(nul + 1);

  std::vector<std::set<std::string>> keys;  // of the objects that are open
  size_t depth = 0;
  const auto check = [&](int, json::parse_event_t event, json& parsed) {
    using Event = json::parse_event_t;
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::object_start || event == Event::array_start) ++depth;
    if (event == Event::object_end || event == Event::array_end) --depth;
    if (depth > kMaxDepth) refuse(str("is nested more than ", kMaxDepth, " deep"));
    if (event == Event::key && !keys.back().insert(parsed.get<std::string>()).second)
      refuse(str("has the field '", printable(parsed.get<std::string>()), "' twice"));
    return true;
  };
  json root;
  try {
    root = json::parse(text, check);
  } catch (const json::parse_error& e) {
    invalid(e.byte);
  } catch (const json::exception&) {
    refuse("holds a number that is too large for a double");
  }
  if (!root.is_object()) refuse(str("must be a JSON object, found ", root.type_name()));
  return root;
}

void Fields::refuse(const std::string& why) const { throw ModelLoadError(str(printable(source_, 4096), ": ", why)); }

std::string Fields::name(std::string_view key) const { return prefix_ + printable(key); }

const json* Fields::find(const char* key) const {
  const auto it = object_.find(key);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

std::optional<int64_t> Fields::integer(const char* key, int64_t least, int64_t most) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number_integer()) wrong_type(key, "an integer", *value);
  const bool fits = !value->is_number_unsigned() || value->get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX);
  if (!fits || value->get<int64_t>() < least || value->get<int64_t>() > most)
    refuse(str(name(key), " must be from ", least, " to ", most, ", found ", value->dump()));
  return value->get<int64_t>();
}

int64_t Fields::required_integer(const char* key, int64_t most) const {
  const std::optional<int64_t> value = integer(key, 1, most);
  if (!value)
    refuse(str(name(key), " is ", has_key(key) ? "null" : "missing", "; it must be an integer from 1 to ", most));
  return *value;
}

std::optional<double> Fields::number(const char* key, double above, double most, bool inclusive) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) wrong_type(key, "a number", *value);
  const auto x = value->get<double>();
  if (!(inclusive ? x >= above : x > above) || !(x <= most))
    refuse(str(name(key), " must be ", inclusive ? "at least " : "above ", above, " and at most ", most, ", found ",
               value->dump()));
  return x;
}

std::optional<bool> Fields::boolean(const char* key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) wrong_type(key, "true or false", *value);
  return value->get<bool>();
}

std::optional<std::string> Fields::text(const char* key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) wrong_type(key, "a string", *value);
  return value->get<std::string>();
}

std::optional<std::vector<std::string>> Fields::texts(const char* key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_array()) wrong_type(key, "a list of strings", *value);
  std::vector<std::string> list;
  for (const json& item : *value) {
    if (!item.is_string()) wrong_type(key, "a list of strings", item);
    list.push_back(item.get<std::string>());
  }
  return list;
}

const json* Fields::object_field(const char* key) const {
  const json* value = find(key);
  if (value != nullptr && !value->is_object()) wrong_type(key, "an object", *value);
  return value == nullptr || value->empty() ? nullptr : value;
}

void Fields::wrong_type(const char* key, const char* expected, const json& found) const {
  refuse(str(name(key), " must be ", expected, ", found ", found.type_name(),
             found.is_primitive() ? " " + printable(found.dump(), 40) : ""));
}

}  // namespace tiny_vllm
