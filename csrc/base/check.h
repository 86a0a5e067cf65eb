// Checks of user input: they throw, and the message carries both values.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

namespace ktft {

// No iostreams anywhere in the extension: their locale tables are process-wide, and crash when another library brought
// a second libstdc++ into the process.
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

}  // namespace ktft

#define KTFT_CHECK(condition, ...)               \
  do {                                           \
    if (!(condition)) ::ktft::fail(__VA_ARGS__); \
  } while (0)
