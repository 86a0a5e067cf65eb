// bf16: 32 columns in a tile, stored unchanged.
#pragma once

#include "quant/format.h"

namespace ktft {

struct Bf16Codec {
  static constexpr Format kFormat = Format::kBf16;
  static constexpr const char* kCodes = "bfloat16";

  static void encode(const float* values, int cols, float, const float*, uint8_t* tile, int r) {
    bf16* v = reinterpret_cast<bf16*>(tile + r * kRowBytes);
    for (int c = 0; c < 32; c++) v[c] = c < cols ? to_bf16(values[c]) : bf16{0};
  }

  static float decode_one(const PackedMatrix& w, int r, int c) {
    return to_float(reinterpret_cast<const bf16*>(w.tile(r / kTileRows, c / 32))[r % kTileRows * 32 + c % 32]);
  }

  // A tile is already a piece, and the pieces of a strip are contiguous.
  template <class V>
  static const bf16* decode(const PackedMatrix& w, int strip, int piece, bf16*) {
    return reinterpret_cast<const bf16*>(w.tile(strip, piece));
  }
};

}  // namespace ktft
