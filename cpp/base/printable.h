// Text that came out of a file, made fit to stand in an error message.
#pragma once

#include <string>
#include <string_view>

namespace tiny_vllm {

// A name from a file may hold line breaks, bytes that are not UTF-8, or a hundred megabytes. Control characters and
// stray bytes become \xNN, and what is longer than `most` bytes is cut at a character border and ends in "...".
std::string printable(std::string_view text, size_t most = 160);

}  // namespace tiny_vllm
