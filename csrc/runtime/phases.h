// Where the time of layer calls goes: the seconds of each phase, summed until they are taken.
#pragma once

#include <chrono>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace ktft {

using PhaseTimes = std::vector<std::pair<std::string, double>>;  // in order of first appearance

// Adds its lifetime to one phase. Phases follow one another in the calling thread and do not nest.
class Phase {
 public:
  Phase(PhaseTimes& times, const char* name) : times_(times), name_(name), start_(Clock::now()) {}
  Phase(const Phase&) = delete;
  Phase& operator=(const Phase&) = delete;
  ~Phase() {
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    for (auto& [name, sum] : times_)
      if (name == name_) {
        sum += seconds;
        return;
      }
    times_.emplace_back(name_, seconds);
  }

 private:
  using Clock = std::chrono::steady_clock;
  PhaseTimes& times_;
  const char* name_;
  Clock::time_point start_;
};

}  // namespace ktft
