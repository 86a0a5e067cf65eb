#include "numa/pool.h"

#include <pthread.h>
#include <unistd.h>

#include <numeric>

#include "numa/limits.h"

namespace ktft {
namespace {

void bind_to(const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : cpus)
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  // Some containers refuse this. The thread then floats, which is slower but correct.
  if (CPU_COUNT(&set)) pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

}  // namespace

Pool::Pool(const std::vector<std::vector<int>>& node_cpus, const std::vector<int>& threads)
    : total_(std::accumulate(threads.begin(), threads.end(), 0)),
      owner_(getpid()),
      first_cpus_(node_cpus[0]),
      counters_(node_cpus.size()) {
  workers_.reserve(size_t(total_));
  try {
    for (size_t node = 0; node < threads.size(); node++)
      for (int i = node == 0 ? 1 : 0; i < threads[node]; i++) {
        const int thread = int(workers_.size()) + 1;
        workers_.push_back(
            start_thread("thread " + std::to_string(thread + 1) + " of " + std::to_string(total_) + " for the experts",
                         ", or set fewer threads", [this, cpus = node_cpus[node], node, thread] {
                           bind_to(cpus);
                           loop(int(node), thread);
                         }));
      }
  } catch (...) {
    end();
    throw;
  }
}

Pool::~Pool() { end(); }

void Pool::end() {
  stop_ = true;
  round_.fetch_add(1);
  round_.notify_all();
  for (std::thread& worker : workers_) {
    if (getpid() == owner_)
      worker.join();
    else
      worker.detach();
  }
}

void Pool::bind_caller() const { bind_to(first_cpus_); }

std::chrono::nanoseconds Pool::spin_for(std::chrono::nanoseconds most) { return spin_for_.exchange(most); }

void Pool::work(int node, int thread) {
  const int n = nodes();
  try {
    for (int i = 0; i < n; i++) {
      const int at = (node + i) % n;
      for (int task; (task = counters_[at].next.fetch_add(1, std::memory_order_relaxed)) < (*counts_)[at];)
        (*task_)(at, task, thread);
    }
  } catch (...) {
    const std::lock_guard<std::mutex> lock(error_mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

bool Pool::enter() {
  uint32_t at = inside_.load(std::memory_order_relaxed);
  while (at & kOpen)
    if (inside_.compare_exchange_weak(at, at + 1, std::memory_order_acquire, std::memory_order_relaxed)) return true;
  return false;
}

void Pool::loop(int node, int thread) {
  for (uint32_t seen = 0;;) {
    if (!spin(spin_for_.load(), [&] { return round_.load(std::memory_order_acquire) != seen; })) round_.wait(seen);
    seen = round_.load(std::memory_order_acquire);
    if (stop_) return;
    if (!enter()) continue;
    work(node, thread);
    if (inside_.fetch_sub(1, std::memory_order_acq_rel) == 1) inside_.notify_one();
  }
}

void Pool::run(const std::vector<int>& counts, const Task& fn) {
  for (Counter& counter : counters_) counter.next.store(0, std::memory_order_relaxed);
  counts_ = &counts;
  task_ = &fn;
  error_ = nullptr;
  const bool alone = workers_.empty() || std::accumulate(counts.begin(), counts.end(), 0) <= 1 || getpid() != owner_;
  if (!alone) {
    inside_.store(kOpen, std::memory_order_release);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
  }
  work(0, 0);
  if (!alone) {
    inside_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (uint32_t left; (left = inside_.load(std::memory_order_acquire)) != 0;)
      if (!spin(spin_for_.load(), [&] { return inside_.load(std::memory_order_acquire) == 0; })) inside_.wait(left);
  }
  if (error_) std::rethrow_exception(error_);
}

void Pool::run(int count, const std::function<void(int, int)>& fn) {
  std::vector<int> counts(nodes());
  for (int n = 0; n < nodes(); n++) counts[n] = split(count, nodes(), n + 1) - split(count, nodes(), n);
  run(counts, [&](int node, int task, int thread) { fn(split(count, nodes(), node) + task, thread); });
}

}  // namespace ktft
