// Backward pass: gradients of hidden states, routing weights and all LoRA tensors, from the same packed weights.
//
// Gradients are written, not added; an expert without tokens has LoRA gradients of zero. dh before the routing weight
// serves twice: times h it is the routing weight's gradient, so the down projection's output is never stored.
#pragma once

#include "moe/lora_grad.h"

namespace ktft {

struct BackwardArgs {
  const void* hidden;       // [tokens, hidden]
  const void* grad_output;  // [tokens, hidden]
  Dtype dtype;              // of hidden, grad_output and grad_hidden
  void* grad_hidden;        // [tokens, hidden]
  float* grad_weights;      // [tokens, top_k]
  int tokens, top_k;
};

// The parts of it, each for some rows and, of columns, one block.
//   gather_dy            dy's rows and B_down^T dy
//   intermediate_block   dh, then d gate, d up, h and <dh, h>
//   grad_low_rank        B^T d gate, B^T d up
//   hidden_block         d hidden, row by row
void gather_dy(const Call& call, const PackedLora& lora, const TokenRows& dy, const Gradients& at,
               const RowChunk& chunk, Scratch& scratch);
void intermediate_block(const Call& call, const PackedLora& lora, const Gradients& at, int node, const RowChunk& rows,
                        int block, Scratch& scratch);
void grad_low_rank(const Call& call, const PackedLora& lora, const Gradients& at, int node, const RowChunk& chunk,
                   Scratch& scratch);
void hidden_block(const Call& call, const PackedLora& lora, const Gradients& at, int node, const RowChunk& rows,
                  int block, Scratch& scratch);
int intermediate_blocks(const Call& call, int node);

void backward(const Call& call, Saved& saved, const BackwardArgs& args);

}  // namespace ktft
