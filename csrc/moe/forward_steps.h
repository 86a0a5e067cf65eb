// The steps of the forward pass. Each does some rows of one expert and, where it has a `block`, one block of output
// columns. forward.cc runs a step for all experts before the next one, by_expert.cc all steps for one expert.
#pragma once

#include "moe/activations.h"

namespace ktft {

// A_gate x and A_up x. `x` [packed rows, hidden] is in the forward GEMM's layout.
void input_low_rank(const Call& call, const PackedLora& lora, const bf16* x, const Activations& act,
                    const RowChunk& chunk, Scratch& scratch);
// gate, up (with biases and LoRA) and h. `x` may be null with W8A8, which reads int8_x.
void gate_up_block(const Call& call, const PackedLora& lora, const bf16* x, const Activations& act, int node,
                   const RowChunk& rows, int block, Scratch& scratch);
// A_down h.
void hidden_low_rank(const Call& call, const PackedLora& lora, const Activations& act, int node, const RowChunk& chunk,
                     Scratch& scratch);
// y, row by row.
void down_block(const Call& call, const PackedLora& lora, const Activations& act, int node, const RowChunk& rows,
                int block, bf16* y, Scratch& scratch);

int gate_up_blocks(const Call& call, int node);
int hidden_blocks(const Call& call);

}  // namespace ktft
