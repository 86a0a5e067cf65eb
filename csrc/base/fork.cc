#include "base/fork.h"

#include <pthread.h>

#include <list>

namespace ktft {
namespace {

struct Registry {
  std::mutex mutex;
  std::list<ForkMutex*> all;  // in the order of their construction
};

// Never destroyed, because a process may fork while it exits.
Registry& registry();

void before_fork() {
  registry().mutex.lock();
  for (ForkMutex* each : registry().all) each->lock();
}

void after_fork() {
  for (ForkMutex* each : registry().all) each->unlock();
  registry().mutex.unlock();
}

Registry& registry() {
  static Registry* const made = [] {
    pthread_atfork(before_fork, after_fork, after_fork);
    return new Registry;
  }();
  return *made;
}

}  // namespace

ForkMutex::ForkMutex() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().all.push_back(this);
}

ForkMutex::~ForkMutex() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().all.remove(this);
}

}  // namespace ktft
