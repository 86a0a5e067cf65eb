// Checks of user input: they throw, and the message carries both values.
#pragma once

#include <sstream>
#include <stdexcept>

namespace ktft {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

}  // namespace ktft

#define KTFT_CHECK(condition, ...)               \
  do {                                           \
    if (!(condition)) ::ktft::fail(__VA_ARGS__); \
  } while (0)
