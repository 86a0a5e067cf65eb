// Threads bound to NUMA nodes, which run one job at a time.
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
  // One thread list a node; the first thread of the first node is whichever thread calls run(), so a pool of one
  // thread starts none. `node_cpus[n]` are the CPUs node n's threads may float over. Throws when a thread cannot be
  // started.
  Pool(const std::vector<std::vector<int>>& node_cpus, const std::vector<int>& threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return total_; }
  int nodes() const { return int(counters_.size()); }

  // fn(node, task, thread) for every task < counts[node]. A thread takes its own node's tasks first, then helps the
  // others. Which thread runs a task must not change a result. Rethrows the first exception a task threw.
  using Task = std::function<void(int node, int task, int thread)>;
  void run(const std::vector<int>& counts, const Task& fn);

  // The same for tasks that belong to no node.
  void run(int count, const std::function<void(int task, int thread)>& fn);

  // Lets the calling thread float over the first node's CPUs only, as its workers do.
  void bind_caller() const;

  // How long a worker spins for the next job before it sleeps; returns what it was. Waking them all costs as much as a
  // layer of few tokens.
  std::chrono::nanoseconds spin_for(std::chrono::nanoseconds most);

 private:
  struct alignas(64) Counter {
    std::atomic<int> next{0};
  };
  static constexpr uint32_t kOpen = 1u << 31;
  void work(int node, int thread);
  void end();
  // Takes part in the job, if it is still open.
  bool enter();
  void loop(int node, int thread);

  const int total_;
  long owner_;  // a forked child has no workers: it runs every task itself
  std::vector<int> first_cpus_;
  // Idle pools and busy cores cost nothing after this: it bridges the phases of a layer
  std::atomic<std::chrono::nanoseconds> spin_for_{std::chrono::microseconds(50)};
  std::vector<std::thread> workers_;
  std::vector<Counter> counters_;
  const std::vector<int>* counts_ = nullptr;
  const Task* task_ = nullptr;
  alignas(64) std::atomic<uint32_t> round_{0};
  // Workers in the present job, and kOpen until no task is left: nobody waits for a worker that sleeps or has lost its
  // core before it took one.
  alignas(64) std::atomic<uint32_t> inside_{0};
  std::atomic<bool> stop_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

// Splits [0, count) into `parts` runs whose lengths differ by at most one; returns the begin of run i.
static inline int split(int count, int parts, int i) { return int(int64_t(count) * i / parts); }

}  // namespace ktft
