// What everything that computes on the CPU shares within a process: the ISA, the thread pool and the threads' memory.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/fork.h"
#include "kernels/kernels.h"
#include "numa/pool.h"
#include "numa/topology.h"
#include "runtime/phases.h"
#include "runtime/scratch.h"

namespace ktft {

struct Workspace;  // moe/workspace.h

struct Runtime {
  Isa isa;
  Topology topology;
  std::vector<int> node_ids;  // for NodeBuffer
  Pool pool;
  std::vector<Scratch> scratch;  // one for each thread
  // A fork waits for both mutexes, this one and that of `buffers`. The child computes with the one thread it has. Their
  // order matters: see ForkMutex.
  ForkMutex mutex;                       // one call at a time uses the pool
  BufferPool buffers;                    // for memory that comes and goes with every step
  std::shared_ptr<Workspace> workspace;  // of the MoE layers, made by the first of them
  PhaseTimes phases;
  std::atomic<int64_t> weight_bytes{0};  // packed expert weights that products have read since the sum was last taken

  // threads < 1 stands for every physical core the process may use, nodes < 1 for the machine's nodes. More nodes than
  // the machine has emulate a split.
  static std::shared_ptr<Runtime> create(Isa isa, int threads, int nodes);

  const VectorKernels& vec() const { return vector_kernels(isa); }
  PhaseTimes take_phases();

 private:
  Runtime(Isa isa, Topology topology, std::vector<int> node_ids, const std::vector<std::vector<int>>& cpus,
          const std::vector<int>& threads);
};

}  // namespace ktft
