// Linear weights outside the routed experts, in the formats of experts: tiles, then the scales of rows or blocks.
// ktft/dense/formats.py says where they lie.
#pragma once

#include "quant/encoding.h"
#include "runtime/runtime.h"

namespace ktft {

// The number of bytes that a matrix takes.
size_t dense_bytes(Format format, int rows, int cols);

// Packs a matrix into `out`. Returns whether its codes and scales were kept. Throws where it holds NaN or Inf.
bool pack_dense(Pool& pool, Format format, const SourceMatrix& source, void* out);

// y [tokens, rows] = x [tokens, cols] Wᵀ + bias, for a matrix that pack_dense packed, of a multiple of 32 rows. `bias`
// is [rows] or null. With activation_bits of 8 rows are rounded to int8 where StripKernels::bytes says so.
void dense_product(Runtime& runtime, Format format, int rows, int cols, const void* packed, const float* bias,
                   const bf16* x, int tokens, int activation_bits, bf16* y);

}  // namespace ktft
