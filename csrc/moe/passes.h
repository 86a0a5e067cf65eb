// The two passes of one layer's routed experts.
#pragma once

#include "moe/activations.h"
#include "moe/lora_grad.h"

namespace ktft {

// out [tokens, hidden] in the dtype of `hidden`. What backward needs is written to `saved`, if it is given.
void forward(Call& call, const TokenRows& hidden, void* out, Saved* saved, bool retain);

// Forward in one phase, for few tokens, with nothing kept and with adapters of single tokens at most: where a call's
// fixed costs would be a large part of reading the weights.
bool runs_few_rows(const Call& call);
void forward_few_rows(Call& call, const TokenRows& hidden, void* out);

struct BackwardArgs {
  const void* hidden;       // [tokens, hidden]
  const void* grad_output;  // [tokens, hidden]
  Dtype dtype;              // of hidden, grad_output and grad_hidden
  void* grad_hidden;        // [tokens, hidden]
  float* grad_weights;      // [tokens, top_k]
  int tokens, top_k;
};

// Gradients of hidden states, routing weights and all LoRA tensors, from the same packed weights. They are written, not
// added; an expert without tokens has LoRA gradients of zero. dh before the routing weight is used twice: its product
// with h is the routing weight's gradient, so the down projection's output is never stored.
void backward(Call& call, Saved& saved, const BackwardArgs& args);

// The part of forward that a backward under `recompute` repeats: gate, up (with biases and LoRA), h and A_down h.
void gate_up(const Call& call, const PackedLora& lora, const TokenRows& hidden, const Activations& act);

// Both up to y and d hidden [rows, hidden], with each expert's whole pass as one task, so that its activations never
// leave a core's L2 (see runs_by_expert). gate, up and low-rank rows are written where `act` points, in backward only
// to `recompute` them.
void forward_by_expert(const Call& call, const TokenRows& hidden, const Activations& act, bf16* y);
void backward_by_expert(const Call& call, bool recompute, const Gradients& at, const TokenRows& hidden,
                        const TokenRows& dy);

}  // namespace ktft
