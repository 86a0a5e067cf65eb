#pragma once

#include <mutex>

namespace ktft {

// A mutex that a fork waits for, so that in the child it is free and the data it guards is consistent: a child has none
// of its parent's other threads, so what they held would stay locked for ever. A fork locks all of them in the order of
// their construction. So of two that are held at once, the one constructed first must be locked first, and a thread
// that holds one must not wait for Python's GIL, which a fork holds.
class ForkMutex {
 public:
  ForkMutex();
  ~ForkMutex();

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

using ForkLock = std::lock_guard<ForkMutex>;

}  // namespace ktft
