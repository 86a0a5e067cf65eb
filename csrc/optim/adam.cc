#include <algorithm>

#include "base/check.h"
#include "optim/step.h"

namespace ktft {
namespace {

// Elements of a task, and of the parts of it that can be skipped: a part's gradient and moments fit in L1, where the
// kernel finds them after they were checked. Both are multiples of every ISA's lanes.
constexpr int64_t kTask = 32768, kPart = 2048;

// Whether all bits are zero; negative zero does not count. Data that is not zero mostly shows it in the first line.
bool zeros(const char* at, size_t bytes) {
  constexpr size_t kLine = 64;
  for (; bytes >= kLine; at += kLine, bytes -= kLine) {
    uint64_t words[8], any = 0;
    std::memcpy(words, at, kLine);
    for (const uint64_t word : words) any |= word;
    if (any) return false;
  }
  for (size_t i = 0; i < bytes; i++)
    if (at[i]) return false;
  return true;
}

template <class T>
void update(const AdamTensor& tensor, int64_t begin, int64_t end, const AdamKernel<T>& kernel) {
  const T* const grad = static_cast<const T*>(tensor.grad);
  T *const param = static_cast<T*>(tensor.param), *const m = static_cast<T*>(tensor.exp_avg),
           *const v = static_cast<T*>(tensor.exp_avg_sq);
  // With a gradient and moments of zero, the update is p * decay - size * 0 / eps
  const AdamStep& step = tensor.step;
  const float factor = tensor.grad_factor;
  const bool may_rest = step.decay == 1 && step.eps > 0 && step.size - step.size == 0 && factor - factor == 0;
  alignas(64) T scaled[kPart];
  for (int64_t i = begin; i < end; i += kPart) {
    const int64_t count = std::min(kPart, end - i);
    const auto zero = [&](const T* at) {
      return zeros(reinterpret_cast<const char*>(at + i), size_t(count) * sizeof(T));
    };
    if (may_rest && zero(grad) && zero(m) && zero(v)) continue;
    if (factor != 1) multiply(grad + i, scaled, count, factor);
    kernel(count, step, factor != 1 ? scaled : grad + i, param + i, m + i, v + i);
  }
}

}  // namespace

void adam(Runtime& runtime, const std::vector<AdamTensor>& tensors) {
  std::vector<int64_t> ends;  // of each tensor's tasks, counted over all tensors
  for (const AdamTensor& tensor : tensors) {
    KTFT_CHECK(tensor.dtype != Dtype::kF16, "AdamW updates fp32 and bf16 tensors, not fp16");
    ends.push_back((ends.empty() ? 0 : ends.back()) + (tensor.count + kTask - 1) / kTask);
  }
  if (ends.empty()) return;
  KTFT_CHECK(ends.back() <= INT32_MAX, "an optimizer step takes at most ", int64_t(INT32_MAX) * kTask, " elements");
  const VectorKernels& kernels = runtime.vec();
  const ForkLock lock(runtime.mutex);
  runtime.pool.run(int(ends.back()), [&](int task, int) {
    const size_t at = size_t(std::upper_bound(ends.begin(), ends.end(), int64_t(task)) - ends.begin());
    const AdamTensor& tensor = tensors[at];
    const int64_t begin = (task - (at ? ends[at - 1] : 0)) * kTask, end = std::min(begin + kTask, tensor.count);
    if (tensor.dtype == Dtype::kF32)
      update<float>(tensor, begin, end, kernels.adam_f32);
    else
      update<bf16>(tensor, begin, end, kernels.adam_bf16);
  });
}

}  // namespace ktft
