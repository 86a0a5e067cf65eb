// Forward pass of one layer's routed experts.
#pragma once

#include "moe/activations.h"
#include "moe/tokens.h"

namespace ktft {

// out [tokens, hidden] in the dtype of `hidden`. What backward needs is written to `saved`, if it is given.
void forward(Call& call, const TokenRows& hidden, void* out, Saved* saved, bool retain);

// The part of it that a backward under `recompute` repeats: gate, up (with biases and LoRA), h and A_down h.
void gate_up(const Call& call, const PackedLora& lora, const TokenRows& hidden, const Activations& act);

}  // namespace ktft
