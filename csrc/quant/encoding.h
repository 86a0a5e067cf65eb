// A weight matrix as a checkpoint stores it: floating-point values, or codes with one scale for each block.
#pragma once

#include "quant/format.h"

namespace ktft {

// kFp8 is one byte of E4M3 for each value. kInt4 and kMxfp4 have two columns in a byte, the even one in the low half;
// int4 codes are q + 8.
enum class Encoding { kF32, kBf16, kF16, kFp8, kInt4, kMxfp4 };
constexpr const char* kEncodingNames[] = {"f32", "bf16", "f16", "fp8", "int4", "mxfp4"};  // in the order of Encoding

struct SourceMatrix {
  const void* data;  // row-major, contiguous; [rows, cols], or [rows, cols / 2] bytes of 4-bit codes
  Encoding encoding;
  int rows, cols;
  // For codes only: [ceil(rows / block_rows), ceil(cols / block_cols)] of fp32, or of E8M0 bytes for mxfp4.
  const void* scales = nullptr;
  int block_rows = 0, block_cols = 0;
  // For int4: the codes that mean zero, with the shape of the scales; null stands for 8 everywhere.
  const uint8_t* zeros = nullptr;

  size_t scale_at(int row, int col) const {
    return size_t(row / block_rows) * ceil_div(cols, block_cols) + col / block_cols;
  }
};

// Widens row `r` to fp32, in which code x scale is rounded once. Returns the column of the first NaN or Inf, or -1.
int widen_row(const SourceMatrix& source, int r, float* out);

// Whether `format` can hold the source's codes and scales unchanged.
bool keeps(const SourceMatrix& source, Format format);

}  // namespace ktft
