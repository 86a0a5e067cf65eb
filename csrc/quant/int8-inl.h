// int8: 64 columns a tile, W = scale[row] * q, q in [-127, 127], scale = absmax / 127.
#pragma once

#include <cmath>

#include "quant/format.h"

namespace ktft {

struct Int8Codec {
  static constexpr Format kFormat = Format::kInt8;

  static float scale_of(const float* row, int cols) {
    float largest = 0;
    for (int c = 0; c < cols; c++) largest = std::fmax(largest, std::fabs(row[c]));
    return largest / 127;
  }

  static void encode(const float* row, int cols, float scale, uint8_t* out) {
    int8_t* q = reinterpret_cast<int8_t*>(out);
    // The clamp matters for rows so small that their scale is subnormal and row / scale imprecise.
    for (int c = 0; c < 64; c++)
      q[c] = c < cols && scale > 0 ? int8_t(std::lrintf(std::fmax(-127.f, std::fmin(127.f, row[c] / scale)))) : 0;
  }

  static float decode_one(const uint8_t* row, int col) { return float(reinterpret_cast<const int8_t*>(row)[col]); }

  // Two bf16 tiles of 16 x 32 (columns 0-31, then 32-63), without the row scale: |q| <= 127 is exact in bf16.
  template <class V>
  static const bf16* decode(const uint8_t* tile, bf16* out) {
    for (int r = 0; r < kTileRows; r++)
      for (int c = 0; c < 64; c += V::kWidth) {
        const auto q = V::load_int8(reinterpret_cast<const int8_t*>(tile) + r * kRowBytes + c);
        V::store(out + (c / 32) * kTileRows * 32 + r * 32 + c % 32, q);
      }
    return out;
  }
};

}  // namespace ktft
