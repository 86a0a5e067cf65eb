// The limits of this machine, measured on a runtime's own threads. The benchmark compares results with them.
#pragma once

#include <memory>

#include "runtime/runtime.h"

namespace ktft {

enum class Ceiling { kRegisters, kHot };

// FLOP/s of all threads together. Each thread repeats its ISA's loop for `seconds`.
double measure_flops(Runtime& runtime, Ceiling ceiling, double seconds);

// Rates that all threads together reach on operands in main memory. The buffers must be far larger than the caches.
class StreamedMemory {
 public:
  // Spreads `bytes` over the runtime's nodes and fills them. Throws std::bad_alloc.
  StreamedMemory(std::shared_ptr<Runtime> runtime, size_t bytes);

  // Bytes/s, reading all of it once.
  double read();

  // Bytes/s read and written, updating all of it once as AdamW does: of four lines read, three are written back.
  double update();

  // FLOP/s of the bf16 forward GEMM. All of the memory is used once, as weights of `reduction` columns, in calls like a
  // layer's, and each thread has its own tokens.
  double gemm(int tokens, int reduction);

 private:
  double stream(void (*each)(char* at, size_t bytes));  // calls `each` once for all of it; returns bytes/s

  std::shared_ptr<Runtime> runtime_;
  std::vector<NodeBuffer> memory_;
  std::vector<int> chunks_;  // of each node
};

}  // namespace ktft
