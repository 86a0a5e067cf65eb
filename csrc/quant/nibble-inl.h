// Shared by the 4-bit formats: a tile has 128 columns, and a value is bf16(table[code] * the multiplier of its group of
// 32 columns). The formats define the product as rounded, so decoding is exact.
//
// A tile is 16 rows x 64 bytes of codes, then 16 rows x 4 group scales. Byte i of a group's 16 holds column i in its
// low half and column 16 + i in its high half, so that both halves are whole vectors.
//
// A policy (one a format, in its own file) has
//   kFormat, prepare             as a codec: see format.h
//   Scale, kScaleKind            a group's, as stored, and how its bits become its multiplier: "bf16", "integer" or
//                                "power_of_two"; multiplier<V>(scale) does that
//   kScales                      the number of different scales, or 0 when there are too many for a table
//   kTable[16], kUnit            codes' values, and a unit of which all are whole multiples, at most 127 times
//   encode_group(values, row_scale, hint, codes) -> Scale
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "quant/format.h"

namespace ktft {

// Groups without a larger value are packed as zeros, so that no scale is subnormal and no reciprocal overflows.
constexpr float kTiny = 1e-30f;

// For each scale of a policy, the values of all codes, rounded to bf16, as bf16 or as whole numbers. They are repeated
// twice: a look-up uses five bits of an index, and the fifth belongs to the other code of the byte. The ISA is a
// parameter so that ISAs share no code.
template <class Policy, class V, class Word>
struct alignas(64) CodeValues {
  Word rows[Policy::kScales][32];

  static const CodeValues& get() {
    static const CodeValues values = [] {
      CodeValues v;
      for (int s = 0; s < Policy::kScales; s++)
        for (int i = 0; i < 32; i++) {
          const bf16 value =
              to_bf16(Policy::kTable[i % 16] * Policy::template multiplier<V>(typename Policy::Scale(s)));
          if constexpr (std::is_same_v<Word, bf16>)
            v.rows[s][i] = value;
          else
            v.rows[s][i] = Word(to_float(value));
        }
      return v;
    }();
    return values;
  }
};

template <class Policy>
constexpr bool kTableIsWhole = [] {
  for (const float value : Policy::kTable) {
    const float times = value / Policy::kUnit;
    if (!(times >= -127 && times <= 127) || float(int(times)) != times) return false;
  }
  return true;
}();

template <class Policy>
struct NibbleCodec : Policy {
  static_assert(
      kTableIsWhole<Policy>,
      "a value of kTable is not a whole multiple of kUnit, at most 127 times: round the table to multiples of "
      "a unit, as k4's codebook is; or, for a table that must stay as it is, write a codec without "
      "kWholeValues, for which kernels/code_dots-inl.h then decodes, and add its kind of codes to quant/codes.cc "
      "and ktft/lanes/ops/triton_codes.py");
  static constexpr const char* kCodes = "uint8";
  using typename Policy::Scale;
  static_assert(info(Policy::kFormat).tile_bytes == kCodeBytes + kTileRows * 4 * sizeof(Scale));

  static void encode(const float* values, int cols, float row_scale, const float* hints, uint8_t* tile, int r) {
    Scale* const scales = reinterpret_cast<Scale*>(tile + kCodeBytes) + r * 4;
    for (int g = 0; g < 4; g++) {
      uint8_t codes[kGroup] = {};
      scales[g] = g * kGroup < cols ? Policy::encode_group(values + g * kGroup, row_scale, hints ? hints[g] : 0, codes)
                                    : Scale{};
      for (int i = 0; i < 16; i++) tile[r * kRowBytes + g * 16 + i] = uint8_t(codes[i] | codes[16 + i] << 4);
    }
  }

  static float decode_one(const PackedMatrix& w, int r, int c) {
    const uint8_t* tile = w.tile(r / kTileRows, c / 128);
    const int row = r % kTileRows, group = c % 128 / kGroup, i = c % kGroup;
    const int code = tile[row * kRowBytes + group * 16 + i % 16] >> (i / 16 * 4) & 15;
    const Scale scale = reinterpret_cast<const Scale*>(tile + kCodeBytes)[row * 4 + group];
    const float value = Policy::kTable[code] * Policy::template multiplier<void>(scale);
    return to_float(to_bf16(value)) * (w.row_scale ? w.row_scale[r] : 1.f);
  }

  // The values of codes as bytes, 128 + value / kUnit, repeated four times, for V::Codes. group_scale(tile, r * 4 + g)
  // times value / kUnit is the weight before its rounding to bf16.
  struct WholeValues {
    alignas(64) uint8_t at[64];
  };
  static constexpr WholeValues kWholeValues = [] {
    WholeValues values{};
    for (int i = 0; i < 64; i++) values.at[i] = uint8_t(128 + int(Policy::kTable[i % 16] / Policy::kUnit));
    return values;
  }();
  template <class V>
  static float group_scale(const uint8_t* tile, int i) {
    return Policy::template multiplier<V>(reinterpret_cast<const Scale*>(tile + kCodeBytes)[i]) * Policy::kUnit;
  }

  template <class V>
  static const bf16* decode(const PackedMatrix& w, int strip, int piece, bf16* out) {
    const uint8_t* tile = w.tile(strip, piece / 4);
    const uint8_t* codes = tile + piece % 4 * 16;
    const Scale* scales = reinterpret_cast<const Scale*>(tile + kCodeBytes) + piece % 4;
    if constexpr (V::kLooksUpWords && Policy::kScales > 0) {
      const auto& values = CodeValues<Policy, V, bf16>::get();
      for (int r = 0; r < kTileRows; r++) V::look_up(values.rows[scales[r * 4]], codes + r * kRowBytes, out + r * 32);
      return out;
    }
    const auto table = V::load_table(Policy::kTable);
    for (int r = 0; r < kTileRows; r++) {
      const auto scale = V::set1(Policy::template multiplier<V>(scales[r * 4]));
      for (int i = 0; i < 16; i += V::kWidth) {
        const uint8_t* at = codes + r * kRowBytes + i;
        V::store(out + r * 32 + i, V::mul(V::template lookup16<0>(table, at), scale));
        V::store(out + r * 32 + 16 + i, V::mul(V::template lookup16<4>(table, at), scale));
      }
    }
    return out;
  }
};

}  // namespace ktft
