// The choice of experts by a router's logits.
#pragma once

#include "runtime/runtime.h"

namespace ktft {

// For each token the top_k experts with the largest logits, the largest first, and their share of softmax(logits); with
// `renormalize` the shares of a token add up to 1. Of equal logits the first counts as the larger.
//   logits [tokens, experts]; chosen, weights [tokens, top_k]
void choose_experts(Runtime& runtime, const bf16* logits, int tokens, int experts, int top_k, bool renormalize,
                    int64_t* chosen, float* weights);

}  // namespace ktft
