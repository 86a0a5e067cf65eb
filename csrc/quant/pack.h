// Rows of a checkpoint tensor -> tiles, and back for tests and error reports.
#pragma once

#include "quant/format.h"

namespace ktft {

struct SourceMatrix {
  const void* data;  // [rows, cols], row-major, contiguous
  Dtype dtype;
  int rows, cols;
};

struct BadValue {
  int row = -1, col = -1;  // row < 0: none
};

// Packs source rows [row_begin + 16 * strip, +16), columns [col_begin, col_begin + out.cols) into strip `strip` of
// `out`. A row's scale comes from the whole source row, so that slices of one matrix agree. Returns the first NaN or
// Inf met, and then the strip's content is undefined.
BadValue pack_strip(const SourceMatrix& source, int row_begin, int col_begin, const PackedMatrix& out, int strip);

// Dequantized rows of the matrix into dst, row stride ld.
void unpack(const PackedMatrix& matrix, float* dst, size_t ld);

}  // namespace ktft
