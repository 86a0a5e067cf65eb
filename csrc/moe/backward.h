// Backward pass: gradients of hidden states, routing weights and all LoRA tensors, from the same packed weights.
//
// Gradients are written, not added. An expert without tokens has LoRA gradients of zero. dh before the routing weight
// is used twice: its product with h is the routing weight's gradient, so the down projection's output is never stored.
#pragma once

#include "moe/activations.h"

namespace ktft {

struct BackwardArgs {
  const void* hidden;       // [tokens, hidden]
  const void* grad_output;  // [tokens, hidden]
  Dtype dtype;              // of hidden, grad_output and grad_hidden
  void* grad_hidden;        // [tokens, hidden]
  float* grad_weights;      // [tokens, top_k]
  int tokens, top_k;
};

void backward(Call& call, Saved& saved, const BackwardArgs& args);

}  // namespace ktft
