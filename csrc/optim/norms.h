// Norms of gradients, and clipping by them, on a runtime's threads.
#pragma once

#include <vector>

#include "moe/workspace.h"

namespace ktft {

// `rows` rows of `cols` elements, fp32 or bf16, one after the other.
struct RowTensor {
  Dtype dtype;
  int64_t rows, cols;
  void* data;
};

// The norm of each row of each tensor, all of them one after the other. Squares are summed in fp64, in an order that
// does not depend on threads, so that no gradient overflows.
std::vector<float> row_norms(Runtime& runtime, const std::vector<RowTensor>& tensors);

// Multiplies all elements, in fp32.
void scale(Runtime& runtime, const std::vector<RowTensor>& tensors, float factor);

}  // namespace ktft
