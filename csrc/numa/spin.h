// Waiting for another thread without sleeping.
#pragma once

#include <chrono>

namespace ktft {

// Whether done() came true within `most`.
template <class Done>
bool spin(std::chrono::nanoseconds most, const Done& done) {
  const auto end = std::chrono::steady_clock::now() + most;
  do {
    for (int i = 0; i < 64; i++) {
      if (done()) return true;
      __builtin_ia32_pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return done();
}

}  // namespace ktft
