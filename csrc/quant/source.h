// A weight matrix as a checkpoint has it: plain floats, or codes with the scales of their blocks.
#pragma once

#include "quant/format.h"

namespace ktft {

// kFp8: a byte of E4M3 each. kInt4, kMxfp4: two columns a byte, the even one in the low half; int4 codes are q + 8.
enum class Encoding { kF32, kBf16, kF16, kFp8, kInt4, kMxfp4 };

struct SourceMatrix {
  const void* data;  // row-major, contiguous; [rows, cols], of 4-bit codes [rows, cols / 2]
  Encoding encoding;
  int rows, cols;
  // Of codes only: [ceil(rows / block_rows), ceil(cols / block_cols)], fp32, or E8M0 bytes of mxfp4.
  const void* scales = nullptr;
  int block_rows = 0, block_cols = 0;
  // Codes that mean zero, like scales, where int4 has them; null: 8 everywhere.
  const uint8_t* zeros = nullptr;

  size_t scale_at(int row, int col) const {
    return size_t(row / block_rows) * ceil_div(cols, block_cols) + col / block_cols;
  }
};

// Widens row `r` to fp32, code x scale being exact up to fp32's own rounding; returns the column of the first NaN or
// Inf, or -1.
int widen_row(const SourceMatrix& source, int r, float* out);

// Whether `format` holds the source's codes and scales as they are.
bool keeps(const SourceMatrix& source, Format format);

}  // namespace ktft
