// Gradients of all LoRA matrices, once backward has the gradients of everything they multiply.
#pragma once

#include "moe/forward.h"

namespace ktft {

// What backward knows about one call. Gradients of gate, up and the output carry their weights' row scales.
struct Gradients {
  struct PerNode {
    bf16 *gate, *up;       // [packed rows, width], from forward
    bf16* h;               // [packed rows, width]; null when down has no LoRA
    bf16* grad[2];         // [packed rows, width]: d gate, d up
    LowRank low_rank[2];   // B^T d gate, B^T d up: this node's part
    float* low_rank_down;  // [rows, r]: A_down h, this node's part
    float* weight_grads;   // [width / kDotCols, rows]: parts of <dh, h>
    bf16* dx;              // [rows, hidden]: d hidden
  };
  std::vector<PerNode> nodes;
  bf16* dy;             // [packed rows, hidden]
  float* bias_dots;     // [rows]: <dy, down's bias>; null without biases
  LowRank low_rank_dy;  // B_down^T dy
  float* low_rank[2];   // [rows, r]: A_gate x, A_up x
};

// Writes grad_a and grad_b of all experts that are not elsewhere.
void lora_gradients(const Call& call, const Gradients& at, const TokenRows& hidden);

// The same, of one expert that saw tokens; `memory` keeps what all its blocks need.
void expert_gradients(const Call& call, const Gradients& at, const TokenRows& hidden, const RowChunk& rows,
                      Scratch& memory, Scratch& scratch);
// Zeroes the gradients of experts without tokens, those elsewhere apart.
void zero_idle_gradients(const Call& call);

}  // namespace ktft
