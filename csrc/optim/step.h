// The optimizer step over many tensors, on a runtime's threads: norms of gradients, clipping and AdamW.
#pragma once

#include <vector>

#include "runtime/runtime.h"

namespace ktft {

// `rows` contiguous rows of `cols` elements, fp32 or bf16.
struct RowTensor {
  Dtype dtype;
  int64_t rows, cols;
  void* data;
};

inline float load(float v) { return v; }
inline float load(bf16 v) { return to_float(v); }
inline void store(float* at, float v) { *at = v; }
inline void store(bf16* at, float v) { *at = to_bf16(v); }

// Writes elements times `factor`, in fp32; `to` may be `from`.
template <class T>
void multiply(const T* from, T* to, int64_t count, float factor) {
  for (int64_t i = 0; i < count; i++) store(to + i, load(from[i]) * factor);
}

// Writes the norm of each row of each tensor, in order. Squares are summed in fp64, so that no gradient overflows, and
// in an order that does not depend on the number of threads.
void row_norms(Runtime& runtime, const std::vector<RowTensor>& tensors, float* norms);

// Returns the sum over the bits of each row's elements, in order: 0 for zeros, and another number after any one update.
std::vector<int64_t> row_bits(Runtime& runtime, const std::vector<RowTensor>& tensors);

// Multiplies all elements, in fp32.
void scale(Runtime& runtime, const std::vector<RowTensor>& tensors, float factor);

// A tensor of `count` elements with its gradient and moments, all of the same dtype (fp32 or bf16), and its step. The
// gradient is multiplied by `grad_factor`, and rounded to its dtype, before it is used.
struct AdamTensor {
  Dtype dtype;
  int64_t count;
  float grad_factor;
  const void* grad;
  void *param, *exp_avg, *exp_avg_sq;
  AdamStep step;
};

// Updates all tensors, reading and writing each byte once, except where gradient and moments are zero and the update
// would change nothing. Throws std::invalid_argument for any other dtype.
void adam(Runtime& runtime, const std::vector<AdamTensor>& tensors);

}  // namespace ktft
