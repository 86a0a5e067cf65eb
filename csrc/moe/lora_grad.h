// Gradients of all LoRA matrices. They are computed after the gradients of everything that the matrices multiply.
#pragma once

#include "moe/activations.h"
#include "moe/tokens.h"

namespace ktft {

// Pointers to the intermediate results of one backward. Gradients of gate, up and the output include the row scales of
// the weights that produced these.
struct Gradients {
  Activations act;  // of forward; h is computed again, where down has LoRA
  struct PerNode {
    bf16* grad[2] = {};             // [packed rows, width]: d gate, d up
    LowRank low_rank[2];            // this node's part of B^T d gate, B^T d up
    float* weight_grads = nullptr;  // [width / kDotCols, rows]: parts of <dh, h>
    bf16* dx = nullptr;             // [rows, hidden]: d hidden
  };
  std::vector<PerNode> nodes;
  bf16* dy = nullptr;          // [packed rows, hidden]
  float* bias_dots = nullptr;  // [rows]: <dy, down's bias>; null without biases
  LowRank low_rank_dy;         // B_down^T dy
};

// Writes grad_a and grad_b of all experts that are not elsewhere.
void lora_gradients(const Call& call, const Gradients& at, const TokenRows& hidden);

// The same for one expert that has tokens. `memory` holds what all of its blocks need.
void expert_gradients(const Call& call, const Gradients& at, const TokenRows& hidden, const RowChunk& rows,
                      Scratch& memory, Scratch& scratch);
// Sets the gradients of experts without tokens to zero, except for experts that are elsewhere.
void zero_idle_gradients(const Call& call);

}  // namespace ktft
