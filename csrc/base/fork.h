// What fork() must leave whole in the child.
#pragma once

#include <mutex>

namespace ktft {

// A mutex that a fork waits for, so that a child finds it free and what it guards whole. A child has none of its
// parent's other threads: a mutex that one of them held would stay locked there for ever.
// A fork takes all of them in the order in which they were made. Where one is locked inside of another, the outer one
// must therefore have been made first, and whoever holds one must not wait for Python's GIL, which a fork holds.
class ForkMutex {
 public:
  ForkMutex();
  ~ForkMutex();
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

using ForkLock = std::lock_guard<ForkMutex>;

}  // namespace ktft
