// fp8: 64 columns in a tile, E4M3 codes (OCP: no infinity, largest 448), W = bf16(code * scale[row / 128, col / 128]).
//
// The last block of a dimension may be short. scale = absmax / 448 in fp32. The format defines the product as rounded
// to bf16, which is what casting an FP8 checkpoint to BF16 gives, so decoding is exact.
#pragma once

#include <algorithm>
#include <cmath>

#include "quant/format.h"

namespace ktft {

struct Fp8Codec {
  static constexpr Format kFormat = Format::kFp8;
  static constexpr const char* kCodes = "float8_e4m3fn";
  static constexpr float kLargest = 448;

  // |v| <= 448; ties to even.
  static uint8_t encode_one(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    const uint8_t sign = uint8_t(bits >> 24 & 0x80);
    const float size = std::fabs(v);
    if (size < 0.015625f) return sign | uint8_t(std::lrintf(size * 512));  // subnormal: multiples of 2^-9
    bits &= 0x7fffffff;
    return sign | uint8_t(((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3));
  }

  static void encode(const float* values, int cols, float scale, const float*, uint8_t* tile, int r) {
    for (int c = 0; c < 64; c++)
      tile[r * kRowBytes + c] =
          c < cols && scale > 0 ? encode_one(std::max(-kLargest, std::min(kLargest, values[c] / scale))) : 0;
  }

  static float decode_one(const PackedMatrix& w, int r, int c) {
    const uint8_t code = w.tile(r / kTileRows, c / 64)[r % kTileRows * kRowBytes + c % 64];
    const float value = half_to_float(uint16_t((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256;
    return to_float(to_bf16(value * w.block_scale_at(r, c)));
  }

  template <class V>
  static const bf16* decode(const PackedMatrix& w, int strip, int piece, bf16* out) {
    const uint8_t* codes = w.tile(strip, piece / 2) + piece % 2 * 32;
    const auto scale =
        V::set1(w.block_scale_at(strip * kTileRows, piece * 32) * 256);  // load_fp8 returns 1/256 of the value
    for (int r = 0; r < kTileRows; r++)
      for (int c = 0; c < 32; c += V::kWidth)
        V::store(out + r * 32 + c, V::mul(V::load_fp8(codes + r * kRowBytes + c), scale));
    return out;
  }
};

}  // namespace ktft
