// What this machine can do at most, measured on a runtime's own threads: the benchmark's scale.
#pragma once

#include <memory>

#include "moe/workspace.h"

namespace ktft {

enum class Ceiling { kRegisters, kHot };

// FLOP/s of all threads together, each repeating its ISA's loop for `seconds`.
double measure_flops(Runtime& runtime, Ceiling ceiling, double seconds);

// Bytes/s that all threads together read from memory, for buffers far larger than the caches.
class ReadBandwidth {
 public:
  // Spreads `bytes` over the runtime's nodes and touches every page. Throws std::bad_alloc.
  ReadBandwidth(std::shared_ptr<Runtime> runtime, size_t bytes);

  // Reads all of it once.
  double measure();

 private:
  std::shared_ptr<Runtime> runtime_;
  std::vector<NodeBuffer> memory_;
  std::vector<int> chunks_;  // a node
};

}  // namespace ktft
