// A router and its experts, for calls without LoRA or backward.
#pragma once

#include <memory>

#include "dense/weight.h"
#include "moe/layer.h"

namespace ktft {

// Rows that a product may write: it stores whole lines. Their number of elements is a multiple of 32.
struct alignas(64) Line {
  bf16 values[32];
};

inline std::unique_ptr<Line[]> lines_of(int64_t elements) {
  return std::make_unique_for_overwrite<Line[]>(elements / 32);
}

struct MoeBlock {
  DenseWeight router;  // [experts, hidden]
  MoeLayer* experts;
  int top_k;
  bool renormalize;     // see choose_experts
  int activation_bits;  // of the experts' products
  int64_t* chosen;      // [experts]: how often each expert was chosen, to which a call adds

  // y [tokens, hidden] from x [tokens, hidden]. Returns the seconds that the experts took. Throws as MoeLayer::forward
  // does.
  double run(Runtime& runtime, const bf16* x, int tokens, bf16* y) const;
};

}  // namespace ktft
