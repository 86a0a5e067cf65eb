// What this machine can do at most, measured on a runtime's own threads: the benchmark's scale.
#pragma once

#include <memory>

#include "moe/workspace.h"

namespace ktft {

enum class Ceiling { kRegisters, kHot };

// FLOP/s of all threads together, each repeating its ISA's loop for `seconds`.
double measure_flops(Runtime& runtime, Ceiling ceiling, double seconds);

// What all threads together make of operands that lie in memory, for buffers far larger than the caches.
class StreamedMemory {
 public:
  // Spreads `bytes` over the runtime's nodes and fills them. Throws std::bad_alloc.
  StreamedMemory(std::shared_ptr<Runtime> runtime, size_t bytes);

  // Bytes/s, reading all of it once.
  double read();

  // FLOP/s of the bf16 forward GEMM and nothing else: calls as a layer makes them, all of the memory once as weights of
  // `reduction` columns, each thread's tokens its own, results not used.
  double gemm(int tokens, int reduction);

 private:
  std::shared_ptr<Runtime> runtime_;
  std::vector<NodeBuffer> memory_;
  std::vector<int> chunks_;  // a node
};

}  // namespace ktft
