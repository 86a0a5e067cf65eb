#include "moe/choose.h"

#include <cmath>

#include "base/check.h"

namespace ktft {
namespace {

constexpr int kTaskTokens = 16;

void choose_for_token(const bf16* logits, int experts, int top_k, bool renormalize, int64_t* chosen, float* weights) {
  // `weights` holds the logits of the chosen. NaN is never larger, so there are always top_k of them.
  for (int e = 0; e < experts; e++) {
    const float logit = to_float(logits[e]);
    int place = std::min(e, top_k);
    if (place == top_k && !(logit > weights[top_k - 1])) continue;
    for (place = std::min(place, top_k - 1); place > 0 && logit > weights[place - 1]; place--) {
      weights[place] = weights[place - 1];
      chosen[place] = chosen[place - 1];
    }
    weights[place] = logit;
    chosen[place] = e;
  }
  const float most = weights[0];
  float total = 0;
  if (renormalize) {
    for (int i = 0; i < top_k; i++) total += std::exp(weights[i] - most);
  } else {
    for (int e = 0; e < experts; e++) total += std::exp(to_float(logits[e]) - most);
  }
  for (int i = 0; i < top_k; i++) weights[i] = std::exp(weights[i] - most) / total;
}

}  // namespace

void choose_experts(Runtime& runtime, const bf16* logits, int tokens, int experts, int top_k, bool renormalize,
                    int64_t* chosen, float* weights) {
  KTFT_CHECK(top_k >= 1 && top_k <= experts, "top_k is ", top_k, ", but there are ", experts, " experts");
  const ForkLock lock(runtime.mutex);
  runtime.pool.run(ceil_div(tokens, kTaskTokens), [&](int task, int) {
    for (int t = task * kTaskTokens; t < std::min(tokens, (task + 1) * kTaskTokens); t++)
      choose_for_token(logits + int64_t(t) * experts, experts, top_k, renormalize, chosen + int64_t(t) * top_k,
                       weights + int64_t(t) * top_k);
  });
}

}  // namespace ktft
