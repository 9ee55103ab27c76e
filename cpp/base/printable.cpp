#include "base/printable.h"

namespace tiny_vllm {
namespace {

// Bytes of the well-formed UTF-8 character that starts at text[i], or 0. (Table 3-7 of the Unicode standard.)
size_t utf8_length(std::string_view text, size_t i) {
  const auto byte = [&](size_t k) { return k < text.size() ? static_cast<unsigned char>(text[k]) : 0u; };
  const unsigned lead = byte(i);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4) return 0;
  for (size_t k = 1; k < length; ++k)
    if ((byte(i + k) & 0xc0) != 0x80) return 0;
  const unsigned second = byte(i + 1);
  if ((lead == 0xe0 && second < 0xa0) || (lead == 0xed && second > 0x9f) || (lead == 0xf0 && second < 0x90) ||
      (lead == 0xf4 && second > 0x8f))
    return 0;
  return length;
}

}  // namespace

std::string printable(std::string_view text, size_t most) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const size_t length = utf8_length(text, i);
    const auto lead = static_cast<unsigned char>(text[i]);
    const bool plain = length > 0 && lead >= 0x20 && lead != 0x7f;
    if (out.size() + (plain ? length : 4) > most) return out + "...";
    if (plain) {
      out.append(text, i, length);
      i += length;
    } else {
      out += {'\\', 'x', kHex[lead >> 4], kHex[lead & 15]};
      ++i;
    }
  }
  return out;
}

}  // namespace tiny_vllm
