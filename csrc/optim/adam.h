// One optimizer step of AdamW over many tensors, on a runtime's threads.
#pragma once

#include <vector>

#include "runtime/runtime.h"

namespace ktft {

// A tensor of `count` elements with its gradient and moments, all of the same dtype (fp32 or bf16), and its step.
struct AdamTensor {
  Dtype dtype;
  int64_t count;
  const void* grad;
  void *param, *exp_avg, *exp_avg_sq;
  AdamStep step;
};

// Updates all tensors, reading and writing each byte once. Parts whose gradient and moments are zero are skipped if the
// update would not change them. Throws std::invalid_argument for any other dtype.
void adam(Runtime& runtime, const std::vector<AdamTensor>& tensors);

}  // namespace ktft
