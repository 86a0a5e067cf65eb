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

  // Bytes/s, read and written together, updating it once in AdamW's mix: of four lines read, three are written back.
  double update();

  // FLOP/s of the bf16 forward GEMM and nothing else: calls as a layer makes them, all of the memory once as weights of
  // `reduction` columns, each thread's tokens its own, results not used.
  double gemm(int tokens, int reduction);

 private:
  double stream(void (*each)(char* at, size_t bytes));  // all of it once; bytes/s of its size

  std::shared_ptr<Runtime> runtime_;
  std::vector<NodeBuffer> memory_;
  std::vector<int> chunks_;  // a node
};

}  // namespace ktft
