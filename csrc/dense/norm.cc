#include "dense/norm.h"

namespace ktft {
namespace {

constexpr int kTaskTokens = 4, kTaskElements = 1 << 13;  // either is worth a task of its own

template <class Row>
void by_tokens(Runtime& runtime, int size, int tokens, const Row& row) {
  const int each = std::max(kTaskTokens, kTaskElements / size);
  const ForkLock lock(runtime.mutex);
  runtime.pool.run(ceil_div(tokens, each), [&](int task, int) {
    for (int t = task * each; t < std::min(tokens, (task + 1) * each); t++) row(int64_t(t) * size);
  });
}

}  // namespace

void Norm::run(Runtime& runtime, const bf16* x, bf16* residual, int tokens, bf16* out) const {
  const VectorKernels& vec = runtime.vec();
  by_tokens(runtime, size, tokens, [&](int64_t at) {
    vec.norm({size, x + at, residual ? residual + at : nullptr, weight, epsilon, out + at});
  });
}

void Norm::run_backward(Runtime& runtime, const bf16* x, const bf16* grad, int tokens, bf16* out) const {
  const VectorKernels& vec = runtime.vec();
  by_tokens(runtime, size, tokens,
            [&](int64_t at) { vec.norm_backward({size, x + at, weight, epsilon, grad + at, out + at}); });
}

}  // namespace ktft
