// One expert's whole pass as one task of one thread, so that its activations never leave that core's L2.
// runs_by_expert() says when this is done.
#pragma once

#include "moe/activations.h"
#include "moe/lora_grad.h"
#include "moe/tokens.h"

namespace ktft {

// Computes y [rows, hidden] of all experts. gate, up and low-rank rows are written where `act` points.
void forward_by_expert(const Call& call, const TokenRows& hidden, const Activations& act, bf16* y);

// Computes all of backward's results row by row, and LoRA's gradients. `recompute` says where gate and up are computed
// again first; it is null if they were kept.
void backward_by_expert(const Call& call, const Activations* recompute, const Gradients& at, const TokenRows& hidden,
                        const TokenRows& dy);

}  // namespace ktft
