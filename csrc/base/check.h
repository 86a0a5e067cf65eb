// Checks of user input. A failed check throws, with both values in the message.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

namespace ktft {

// The extension uses no iostreams: their locale tables are process-wide, and crash when another library has brought a
// second libstdc++ into the process.
template <class T>
std::string to_text(const T& value) {
  if constexpr (std::is_arithmetic_v<T>) {
    return std::to_string(value);
  } else {
    return std::string(value);
  }
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::invalid_argument((to_text(parts) + ...));
}

// Returns which of name_of(0) to name_of(count - 1) `name` is. Throws, listing all, if it is none of them.
template <class NameOf>
int index_of(const std::string& name, const char* what, int count, const NameOf& name_of) {
  std::string known;
  for (int i = 0; i < count; i++) {
    if (name == name_of(i)) return i;
    known += std::string(i ? ", " : "") + name_of(i);
  }
  fail("unknown ", what, " '", name, "'; ktft has: ", known);
}

}  // namespace ktft

#define KTFT_CHECK(condition, ...)               \
  do {                                           \
    if (!(condition)) ::ktft::fail(__VA_ARGS__); \
  } while (0)
