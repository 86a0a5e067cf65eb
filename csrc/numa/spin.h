// Waiting for another thread without sleeping.
#pragma once

#include <sched.h>

#include <chrono>

namespace ktft {

// Polls done() for up to `most` and returns whether it became true. After 50 us it yields the CPU between polls,
// because the thread it waits for may need it.
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
