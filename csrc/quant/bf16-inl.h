// bf16: 32 columns a tile, stored as they are.
#pragma once

#include "quant/format.h"

namespace ktft {

struct Bf16Codec {
  static constexpr Format kFormat = Format::kBf16;

  static float scale_of(const float*, int) { return 1.f; }

  // row[0..32) -> 64 bytes; `cols` < 32 at the right edge.
  static void encode(const float* row, int cols, float, uint8_t* out) {
    bf16* v = reinterpret_cast<bf16*>(out);
    for (int c = 0; c < 32; c++) v[c] = c < cols ? to_bf16(row[c]) : bf16{0};
  }

  static float decode_one(const uint8_t* row, int col) { return to_float(reinterpret_cast<const bf16*>(row)[col]); }

  // The tile as bf16 tiles of 16 x 32, row-major: here it is one already.
  template <class V>
  static const bf16* decode(const uint8_t* tile, bf16*) {
    return reinterpret_cast<const bf16*>(tile);
  }
};

}  // namespace ktft
