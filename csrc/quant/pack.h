// Packs rows of a checkpoint tensor into tiles, and unpacks them for tests and error reports.
#pragma once

#include "quant/encoding.h"

namespace ktft {

struct BadValue {
  int row = -1, col = -1;  // row < 0: none
};

// The rows of a unit, which share scales and are packed together. The last unit may be short.
constexpr int pack_rows(Format format) { return info(format).block_scaled ? kScaleBlock : kTileRows; }

// Packs unit `unit` of `out`, whose first row and column are row_begin and col_begin of the source, multiples of
// kSliceMultiple. With `keep`, which keeps() must allow, codes and scales stay unchanged. A row's scale comes from the
// whole source row, so that slices agree. Returns the first NaN or Inf; the unit's content is then undefined.
BadValue pack(const SourceMatrix& source, int row_begin, int col_begin, const PackedMatrix& out, int unit, bool keep);

// Dequantizes the rows of the matrix into dst, whose row stride is ld.
void unpack(const PackedMatrix& matrix, float* dst, size_t ld);

}  // namespace ktft
