// One optimizer step of AdamW over many tensors, on a runtime's threads.
#pragma once

#include <vector>

#include "moe/workspace.h"

namespace ktft {

// A tensor of `count` elements with its gradient and moments, all of one dtype (fp32 or bf16), and its step.
struct AdamTensor {
  Dtype dtype;
  int64_t count;
  const void* grad;
  void *param, *exp_avg, *exp_avg_sq;
  AdamStep step;
};

// Updates all of them, reading and writing each byte once. A part whose gradient and moments are zero is left as it is
// where the update would not change it. Throws std::invalid_argument for another dtype.
void adam(Runtime& runtime, const std::vector<AdamTensor>& tensors);

}  // namespace ktft
