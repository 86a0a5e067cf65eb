// Rows of a checkpoint tensor -> tiles, and back for tests and error reports.
#pragma once

#include "quant/source.h"

namespace ktft {

struct BadValue {
  int row = -1, col = -1;  // row < 0: none
};

// Rows that are packed together, because they share scales: a unit. The last one may be short.
constexpr int pack_rows(Format format) { return info(format).block_scaled ? kScaleBlock : kTileRows; }

// Packs unit `unit` of `out`, whose first row and column are row_begin and col_begin of the source, multiples of
// kSliceMultiple. With `keep`, which keeps() must allow, codes and scales stay as they are. A row's scale comes from
// the whole source row, so that slices of one matrix agree. Returns the first NaN or Inf met, and then the unit's
// content is undefined.
BadValue pack(const SourceMatrix& source, int row_begin, int col_begin, const PackedMatrix& out, int unit, bool keep);

// Dequantized rows of the matrix into dst, row stride ld.
void unpack(const PackedMatrix& matrix, float* dst, size_t ld);

}  // namespace ktft
