#include "dense/norm.h"

namespace ktft {

void Norm::run(Runtime& runtime, const bf16* x, bf16* residual, int tokens, bf16* out) const {
  constexpr int kTaskTokens = 4;  // worth a task of their own
  const ForkLock lock(runtime.mutex);
  const VectorKernels& vec = runtime.vec();
  runtime.pool.run(ceil_div(tokens, kTaskTokens), [&](int task, int) {
    for (int t = task * kTaskTokens; t < std::min(tokens, (task + 1) * kTaskTokens); t++) {
      const int64_t at = int64_t(t) * size;
      vec.norm({size, x + at, residual ? residual + at : nullptr, weight, epsilon, out + at});
    }
  });
}

}  // namespace ktft
