// The steps of both passes. Each does some rows of one expert and, where it has a `block`, one block of output columns.
// forward.cc and backward.cc run a step for all experts before the next one, by_expert.cc all steps for one expert.
#pragma once

#include <atomic>

#include "moe/activations.h"
#include "moe/lora_grad.h"

namespace ktft {

struct ForwardSteps {
  const Call& call;
  const PackedLora& lora;
  const Activations& act;
  bf16* x;  // [packed rows, hidden] in the forward GEMM's layout; may be null with W8A8 without LoRA: it reads int8_x

  // x's rows, A_gate x and A_up x. `bad` becomes a token with NaN or Inf.
  void gather_x(const TokenRows& tokens, const RowChunk& chunk, std::atomic<int>& bad, Scratch& scratch) const;
  // gate, up (with biases and LoRA) and h.
  void gate_up_block(int node, const RowChunk& rows, int block, Scratch& scratch) const;
  // A_down h.
  void hidden_low_rank(int node, const RowChunk& chunk, Scratch& scratch) const;
  // y, row by row.
  void down_block(int node, const RowChunk& rows, int block, bf16* y, Scratch& scratch) const;
};

struct BackwardSteps {
  const Call& call;
  const PackedLora& lora;
  const Gradients& at;

  // dy's rows, and B_down^T dy.
  void gather_dy(const TokenRows& dy, const RowChunk& chunk, Scratch& scratch) const;
  // dh, then d gate, d up, h and <dh, h>.
  void intermediate_block(int node, const RowChunk& rows, int block, Scratch& scratch) const;
  // B^T d gate and B^T d up.
  void grad_low_rank(int node, const RowChunk& chunk, Scratch& scratch) const;
  // d hidden, row by row.
  void hidden_block(int node, const RowChunk& rows, int block, Scratch& scratch) const;
};

// The number of blocks of gate and up together, of h, of y or d hidden, and of a step without blocks.
int gate_up_blocks(const Call& call, int node);
int intermediate_blocks(const Call& call, int node);
int hidden_blocks(const Call& call, int node);
int one_block(const Call& call, int node);

}  // namespace ktft
