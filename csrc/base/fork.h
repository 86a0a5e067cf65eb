// Locks that stay usable in the child of a fork().
#pragma once

#include <mutex>

namespace ktft {

// A mutex that a fork waits for, so that in the child it is free and the data it guards is consistent. A child has none
// of its parent's other threads: a mutex that one of them held would stay locked for ever.
// A fork locks all of them, in the order of their construction. If one is locked while another is held, the other must
// therefore have been constructed first. A thread that holds one must not wait for Python's GIL, which a fork holds.
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
