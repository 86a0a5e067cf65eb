// The steps of the backward pass. Each does some rows of one expert and, where it has a `block`, one block of columns.
// backward.cc runs a step for all experts before the next one, by_expert.cc all steps for one expert.
#pragma once

#include "moe/lora_grad.h"
#include "moe/tokens.h"

namespace ktft {

// dy's rows, and B_down^T dy.
void gather_dy(const Call& call, const PackedLora& lora, const TokenRows& dy, const Gradients& at,
               const RowChunk& chunk, Scratch& scratch);
// dh, then d gate, d up, h and <dh, h>.
void intermediate_block(const Call& call, const PackedLora& lora, const Gradients& at, int node, const RowChunk& rows,
                        int block, Scratch& scratch);
// B^T d gate and B^T d up.
void grad_low_rank(const Call& call, const PackedLora& lora, const Gradients& at, int node, const RowChunk& chunk,
                   Scratch& scratch);
// d hidden, row by row.
void hidden_block(const Call& call, const PackedLora& lora, const Gradients& at, int node, const RowChunk& rows,
                  int block, Scratch& scratch);

int intermediate_blocks(const Call& call, int node);

}  // namespace ktft
