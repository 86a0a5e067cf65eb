#include "decoder/moe_block.h"

#include <chrono>
#include <vector>

#include "moe/choose.h"

namespace ktft {

double MoeBlock::run(Runtime& runtime, const bf16* x, int tokens, bf16* y) const {
  using Clock = std::chrono::steady_clock;
  const auto lines = lines_of(int64_t(tokens) * router.rows);
  bf16* const logits = lines[0].values;
  std::vector<int64_t> index(int64_t(tokens) * top_k);
  std::vector<float> weights(index.size());
  router.product(runtime, x, tokens, true, logits);
  choose_experts(runtime, logits, tokens, router.rows, top_k, renormalize, index.data(), weights.data());
  const auto begin = Clock::now();
  experts->forward({.hidden = x,
                    .dtype = Dtype::kBf16,
                    .top_k_index = index.data(),
                    .top_k_weights = weights.data(),
                    .tokens = tokens,
                    .top_k = top_k},
                   nullptr, Keep::kNothing, activation_bits, y);
  for (const int64_t expert : index) chosen[expert]++;
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace ktft
