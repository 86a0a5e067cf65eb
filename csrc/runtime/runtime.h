// What everything that computes on the CPU shares within a process: the ISA, the thread pool and the threads' memory.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/fork.h"
#include "kernels/kernels.h"
#include "numa/buffer.h"
#include "numa/pool.h"

namespace ktft {

// A buffer that only grows. Its content is undefined after get().
class Growing {
 public:
  template <class T>
  T* get(size_t bytes, int node = -1) {
    if (bytes > buffer_.size()) {
      buffer_ = NodeBuffer();  // released before the larger one is taken, so that the peak is not their sum
      buffer_ = NodeBuffer(bytes, node);
    }
    return reinterpret_cast<T*>(buffer_.data());
  }
  size_t bytes() const { return buffer_.size(); }

 private:
  NodeBuffer buffer_;
};

// One thread's memory within one task. reset() takes back what take() gave, all or what came since used() was `to`.
class Scratch {
 public:
  void reserve(size_t bytes) { memory_.get<char>(bytes); }
  void reset(size_t to = 0) { used_ = to; }
  size_t used() const { return used_; }
  size_t bytes() const { return memory_.bytes(); }
  template <class T>
  T* take(size_t count) {
    const size_t at = used_;
    used_ += in_lines(count * sizeof(T));
    KTFT_CHECK(used_ <= memory_.bytes(), "internal error: scratch of ", memory_.bytes(), " bytes is too small for ",
               used_);
    return reinterpret_cast<T*>(memory_.get<char>(0) + at);
  }

 private:
  Growing memory_;
  size_t used_ = 0;
};

struct Workspace;  // moe/memory.h

using PhaseTimes = std::vector<std::pair<std::string, double>>;  // seconds, in order of first appearance

// Adds its lifetime to one phase. Phases follow one another in the calling thread and do not nest.
class Phase {
 public:
  Phase(PhaseTimes& times, const char* name) : times_(times), name_(name) {}
  Phase(const Phase&) = delete;
  Phase& operator=(const Phase&) = delete;
  ~Phase();

 private:
  PhaseTimes& times_;
  const char* name_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

struct Runtime {
  Isa isa;
  std::vector<int> node_ids;  // for NodeBuffer
  Pool pool;
  std::vector<Scratch> scratch;  // one for each thread
  // A fork waits for this mutex, then for that of `buffers`: see ForkMutex. The child computes with the thread it has.
  ForkMutex mutex;                       // one call at a time uses the pool
  BufferPool buffers;                    // for memory that comes and goes with every step
  std::shared_ptr<Workspace> workspace;  // of the MoE layers, made by the first of them
  Growing dense_rows;                    // x of a dense product, packed
  Growing attention_parts;               // results of decode attention before they are merged
  PhaseTimes phases;                     // since they were last taken
  std::atomic<int64_t> weight_bytes{0};  // packed expert weights that products have read since the sum was last taken

  // threads < 1 stands for every physical core the process may use, nodes < 1 for the machine's; more emulate a split.
  static std::shared_ptr<Runtime> create(Isa isa, int threads, int nodes);

  const VectorKernels& vec() const { return vector_kernels(isa); }
  PhaseTimes take_phases();

 private:
  Runtime(Isa isa, const std::vector<int>& node_ids, const std::vector<std::vector<int>>& cpus,
          const std::vector<int>& threads)
      : isa(isa), node_ids(node_ids), pool(cpus, threads), scratch(pool.threads()) {}
};

}  // namespace ktft
