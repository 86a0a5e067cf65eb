// A pool of threads bound to NUMA nodes. It runs one job at a time.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace ktft {

// Polls done() for up to `most`; returns whether it became true. After 50 us it yields the CPU between polls, because
// the thread it waits for may need it.
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

class Pool {
 public:
  // Node n has threads[n] threads, which may float over node_cpus[n]. The first of all is the one that calls run(), so
  // a pool of one thread starts none. Throws if a thread cannot be started.
  Pool(const std::vector<std::vector<int>>& node_cpus, const std::vector<int>& threads);
  ~Pool();

  int threads() const { return total_; }
  int nodes() const { return int(counters_.size()); }

  // Calls fn(node, task, thread) for every task < counts[node]; the other form is for tasks that belong to no node. A
  // thread helps other nodes after its own. Results must not depend on that. Rethrows the first exception of a task.
  using Task = std::function<void(int node, int task, int thread)>;
  void run(const std::vector<int>& counts, const Task& fn);
  void run(int count, const std::function<void(int task, int thread)>& fn);

  // Binds the calling thread to the first node's CPUs, like the workers of that node.
  void bind_caller() const;

  // Sets how long a worker spins for the next job before it sleeps, since waking all of them costs as much time as a
  // layer with a few tokens. Returns the previous value.
  std::chrono::nanoseconds spin_for(std::chrono::nanoseconds most);

 private:
  struct alignas(64) Counter {
    std::atomic<int> next{0};
  };
  static constexpr uint32_t kOpen = 1u << 31;
  void work(int node, int thread);
  void end();
  // Joins the job if it is still open. Returns whether it did.
  bool enter();
  void loop(int node, int thread);

  const int total_;
  long owner_;  // the process that has the workers; a forked child runs every task itself
  std::vector<int> first_cpus_;
  // Long enough to bridge the phases of a layer; after it, an idle pool takes no time from busy cores
  std::atomic<std::chrono::nanoseconds> spin_for_{std::chrono::microseconds(50)};
  std::vector<std::thread> workers_;
  std::vector<Counter> counters_;
  const std::vector<int>* counts_ = nullptr;
  const Task* task_ = nullptr;
  alignas(64) std::atomic<uint32_t> round_{0};
  // The number of workers in the current job, plus kOpen until no task is left. So run() does not wait for a worker
  // that sleeps, or that lost its core before it joined.
  alignas(64) std::atomic<uint32_t> inside_{0};
  std::atomic<bool> stop_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

// Splits [0, count) into `parts` runs whose lengths differ by at most one. Returns the start of run i.
static inline int split(int count, int parts, int i) { return int(int64_t(count) * i / parts); }

}  // namespace ktft
