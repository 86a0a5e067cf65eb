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

// A matrix that pack_dense packed, of a multiple of 32 rows.
struct DenseWeight {
  Format format;
  int rows, cols;
  const void* packed;
  const float* bias;    // [rows], or null
  int activation_bits;  // 16; or 8, which rounds rows to int8 where StripKernels::bytes says so

  // y [tokens, rows] = x [tokens, cols] Wᵀ, plus the bias if `biased`. y is aligned to 64 bytes.
  void product(Runtime& runtime, const bf16* x, int tokens, bool biased, bf16* y) const;
};

}  // namespace ktft
