// int8: 64 columns in a tile, W = scale[row] * q, q in [-127, 127], scale = absmax / 127.
#pragma once

#include <algorithm>
#include <cmath>

#include "quant/format.h"

namespace ktft {

struct Int8Codec {
  static constexpr Format kFormat = Format::kInt8;
  static constexpr const char* kCodes = "int8";

  static float prepare(const float* row, int cols, float*) {
    float lanes[16] = {}, largest = 0;  // cols is a multiple of 32
    for (int c = 0; c < cols; c += 16)
      for (int lane = 0; lane < 16; lane++) lanes[lane] = std::max(lanes[lane], std::fabs(row[c + lane]));
    for (float lane : lanes) largest = std::max(largest, lane);
    return largest / 127;
  }

  static void encode(const float* values, int cols, float scale, const float*, uint8_t* tile, int r) {
    int8_t* q = reinterpret_cast<int8_t*>(tile + r * kRowBytes);
    // The clamp matters for rows so small that their scale is subnormal, which makes value / scale imprecise.
    std::fill(q, q + 64, int8_t(0));
    if (!(scale > 0)) return;
    for (int c = 0; c < cols; c++) q[c] = int8_t(round_even(std::max(-127.f, std::min(127.f, values[c] / scale))));
  }

  static float decode_one(const PackedMatrix& w, int r, int c) {
    return float(reinterpret_cast<const int8_t*>(w.tile(r / kTileRows, c / 64))[r % kTileRows * kRowBytes + c % 64]) *
           w.row_scale[r];
  }

  // |q| <= 127 is exact in bf16.
  template <class V>
  static const bf16* decode(const PackedMatrix& w, int strip, int piece, bf16* out) {
    const int8_t* q = reinterpret_cast<const int8_t*>(w.tile(strip, piece / 2)) + piece % 2 * 32;
    for (int r = 0; r < kTileRows; r++)
      for (int c = 0; c < 32; c += V::kWidth) V::store_exact(out + r * 32 + c, V::load_int8(q + r * kRowBytes + c));
    return out;
  }

  // Columns 32 piece to 32 piece + 31 of a row of a tile, for V::dot.
  template <class V>
    requires(V::kPairs)
  static typename V::In pairs(const uint8_t* tile, int row, int piece) {
    return V::to_pairs(reinterpret_cast<const int8_t*>(tile) + row * kRowBytes + piece * 32);
  }

  // The codes as words, row by row.
  static constexpr int kLargestWord = 127;
  template <class V>
  static void decode_words(const PackedMatrix& w, int strip, int piece, int16_t* out) {
    const int8_t* q = reinterpret_cast<const int8_t*>(w.tile(strip, piece / 2)) + piece % 2 * 32;
    for (int r = 0; r < kTileRows; r++) V::Words::widen(q + r * kRowBytes, out + r * 32);
  }
};

}  // namespace ktft
