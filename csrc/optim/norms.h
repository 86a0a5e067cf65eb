// Norms of gradients, and clipping, on a runtime's threads.
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

// Returns the norm of each row of each tensor, in order. Squares are summed in fp64, so that no gradient overflows, and
// in an order that does not depend on the number of threads.
std::vector<float> row_norms(Runtime& runtime, const std::vector<RowTensor>& tensors);

// Multiplies all elements, in fp32.
void scale(Runtime& runtime, const std::vector<RowTensor>& tensors, float factor);

}  // namespace ktft
