// Linear weights outside the routed experts, in the formats of experts: tiles, then the scales of rows or blocks.
// ktft/dense/formats.py says where they lie.
#pragma once

#include "numa/pool.h"
#include "quant/encoding.h"
#include "quant/format.h"

namespace ktft {

// The number of bytes that a matrix takes.
size_t dense_bytes(Format format, int rows, int cols);

// Packs a matrix into `out`. Returns whether its codes and scales were kept. Throws where it holds NaN or Inf.
bool pack_dense(Pool& pool, Format format, const SourceMatrix& source, void* out);

}  // namespace ktft
