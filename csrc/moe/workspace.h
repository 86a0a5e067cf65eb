// What a process's layers share: the ISA, the thread pool, and buffers that grow to the largest call and stay.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "base/check.h"
#include "base/fork.h"
#include "kernels/kernels.h"
#include "moe/phases.h"
#include "numa/buffer.h"
#include "numa/pool.h"
#include "numa/topology.h"

namespace ktft {

// A buffer that only grows; its content is undefined after get().
class Growing {
 public:
  template <class T>
  T* get(size_t count, int node = -1) {
    if (count * sizeof(T) > buffer_.size()) {
      buffer_ = NodeBuffer();  // first give back, then take: the peak is the larger one, not the sum
      buffer_ = NodeBuffer(count * sizeof(T), node);
    }
    return reinterpret_cast<T*>(buffer_.data());
  }
  size_t bytes() const { return buffer_.size(); }

 private:
  NodeBuffer buffer_;
};

// One thread's memory within one task: take() pieces, all (or those taken since used() was `to`) are given back by
// reset().
class Scratch {
 public:
  void reserve(size_t bytes) { memory_.get<char>(bytes); }
  void reset(size_t to = 0) { used_ = to; }
  size_t used() const { return used_; }
  size_t bytes() const { return memory_.bytes(); }
  template <class T>
  T* take(size_t count) {
    const size_t at = used_;
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    KTFT_CHECK(used_ <= memory_.bytes(), "internal error: scratch of ", memory_.bytes(), " bytes is too small for ",
               used_);
    return reinterpret_cast<T*>(memory_.get<char>(0) + at);
  }

 private:
  Growing memory_;
  size_t used_ = 0;
};

struct NodeWorkspace {
  Growing gate, up, h;                     // bf16 [packed rows, width]
  Growing grad[2];                         // bf16 [packed rows, width]: d gate, d up, times the weights' row scales
  Growing h_codes, h_scales;               // Int8Rows of h
  Growing y;                               // bf16 [rows, hidden]: outputs, or d hidden, row by row
  Growing low_rank[kProjections];          // fp32 [rows, r]
  Growing low_rank_operand[kProjections];  // bf16 [packed rows, split_rank]
  Growing weight_grads;                    // fp32 [width / kDotCols, rows]
};

struct Workspace {
  Growing x, dy;                           // bf16 [packed rows, hidden], gathered
  Growing x_codes, x_scales;               // Int8Rows of x
  Growing lora;                            // see PackedLora
  Growing low_rank[kProjections];          // fp32 [rows, r]
  Growing low_rank_operand[kProjections];  // bf16 [packed rows, split_rank]
  Growing bias_dots;                       // fp32 [rows]
  Growing transposed;                      // bf16 [split_rank, packed rows] of each LoRA gradient
  std::vector<NodeWorkspace> nodes;
};

struct Runtime {
  Isa isa;
  Topology topology;
  std::vector<int> node_ids;  // for NodeBuffer
  Pool pool;
  std::vector<Scratch> scratch;        // one a thread
  std::vector<Scratch> expert_memory;  // one a thread: activations of the expert it works on
  Workspace workspace;
  // A child that a fork makes finds both free, and computes with the one thread that it has. The order matters: see
  // ForkMutex.
  ForkMutex mutex;     // one layer call at a time
  BufferPool buffers;  // of what forward keeps for backward
  PhaseTimes phases;
  std::atomic<int64_t> weight_bytes{0};  // packed experts' that products read, until somebody takes the sum

  // threads < 1: every physical core the process may use. nodes < 1: the machine's; more than that emulates a split.
  static std::shared_ptr<Runtime> create(Isa isa, int threads, int nodes);

  const VectorKernels& vec() const { return vector_kernels(isa); }
  size_t workspace_bytes() const;

 private:
  Runtime(Isa isa, Topology topology, std::vector<int> node_ids, const std::vector<std::vector<int>>& cpus,
          const std::vector<int>& threads);
};

}  // namespace ktft
