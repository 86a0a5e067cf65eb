// Waiting for another thread without sleeping.
#pragma once

#include <sched.h>

#include <chrono>

namespace ktft {

// Whether done() came true within `most`. After 50 us it lets others have the CPU in between, who may be awaited.
template <class Done>
bool spin(std::chrono::nanoseconds most, const Done& done) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  for (auto now = begin; now < begin + most; now = Clock::now()) {
    for (int i = 0; i < 64; i++) {
      if (done()) return true;
      __builtin_ia32_pause();
    }
    if (now > begin + std::chrono::microseconds(50)) sched_yield();
  }
  return done();
}

}  // namespace ktft
