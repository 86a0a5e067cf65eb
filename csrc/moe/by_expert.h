// One expert's whole pass as one task of one thread: its activations never leave that core's L2. See plan().
#pragma once

#include "moe/lora_grad.h"

namespace ktft {

// y [rows, hidden] of all experts; gate, up and low-rank rows go where `act` says.
void forward_by_expert(const Call& call, const TokenRows& hidden, const Activations& act, bf16* y);

// All of backward's results row by row, and LoRA's gradients. `recompute`: where gate and up are computed again first,
// or null when they were kept.
void backward_by_expert(const Call& call, const Activations* recompute, const Gradients& at, const TokenRows& hidden,
                        const TokenRows& dy);

// A thread's expert memory.
size_t expert_bytes(const Call& call);

}  // namespace ktft
