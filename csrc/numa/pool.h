// A pool of threads bound to NUMA nodes. It runs one job at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "numa/topology.h"

namespace ktft {

class Pool {
 public:
  // threads[n] is the number of threads on node n. The first thread of the first node is the one that calls run(), so a
  // pool of one thread starts none. node_cpus[n] are the CPUs over which node n's threads may float. Throws if a thread
  // cannot be started.
  Pool(const std::vector<std::vector<int>>& node_cpus, const std::vector<int>& threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return total_; }
  int nodes() const { return int(counters_.size()); }

  // Calls fn(node, task, thread) for every task < counts[node]. A thread runs its own node's tasks first, then helps
  // the other nodes. Results must not depend on which thread runs a task. Rethrows the first exception of a task.
  using Task = std::function<void(int node, int task, int thread)>;
  void run(const std::vector<int>& counts, const Task& fn);

  // The same for tasks that belong to no node.
  void run(int count, const std::function<void(int task, int thread)>& fn);

  // Binds the calling thread to the first node's CPUs, like the workers of that node.
  void bind_caller() const;

  // Sets how long a worker spins for the next job before it sleeps, and returns the previous value. Waking all workers
  // costs as much time as a layer with a few tokens.
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
