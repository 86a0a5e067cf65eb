// RMS norm of hidden states.
#pragma once

#include "runtime/runtime.h"

namespace ktft {

struct Norm {
  int size;            // a multiple of 16
  const bf16* weight;  // [size]
  float epsilon;

  // out [tokens, size] = norm(x) * weight. With a residual [tokens, size], x is added to it first, and the norm is
  // taken of their sum.
  void run(Runtime& runtime, const bf16* x, bf16* residual, int tokens, bf16* out) const;

  // out [tokens, size] = the gradient of x, from that of its norm, which has no residual.
  void run_backward(Runtime& runtime, const bf16* x, const bf16* grad, int tokens, bf16* out) const;
};

}  // namespace ktft
