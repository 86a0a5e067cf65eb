// Dot products of rows of W in a 4-bit format with one or two rows of X, computed on bytes. One look-up turns codes
// into integers, X is in 15-bit fixed point, the sums of a group are exact, and the group's scales multiply them.
// Decoding 128 weights takes six instructions, the products of one token ten.
//
// The rounding of a weight to bf16, which is part of the format, is left out. The difference is up to 2^-9 of a weight,
// at random, which is 0.1% of an output.
#pragma once

#include <algorithm>

#include "kernels/kernels.h"
#include "quant/codecs.h"

namespace ktft {

template <class V, class Codec>
constexpr bool kDotsCodes = requires {
  typename V::Codes;
  Codec::kWholeValues;
};

// 128 columns of one token, x = scales[group] * (128 high + low), in the order of a tile's codes: [0] is multiplied by
// the low halves of its bytes, [1] by the high halves. `start` subtracts the 128 that is added to code values:
//   W . X of lane i = sum_groups scale * (128 (start[i] + values . high) + values . low)
struct alignas(64) FixedPoint {
  int8_t high[2][kRowBytes], low[2][kRowBytes];
  int32_t start[16];
  float scales[4];
};
constexpr int kFixedPointCols = 128;
static constexpr int64_t fixed_bytes(int cols) { return ceil_div(cols, kFixedPointCols) * int64_t(sizeof(FixedPoint)); }

// The same values in registers.
template <class Codes>
struct Planes {
  using Bytes = typename Codes::Bytes;
  Bytes start, high[2], low[2];

  Bytes dot(const Bytes& first, const Bytes& second) const {
    const Bytes sum = Codes::times_128(Codes::dot(Codes::dot(start, first, high[0]), second, high[1]));
    return Codes::dot(Codes::dot(sum, first, low[0]), second, low[1]);
  }
};

template <class Codes>
Planes<Codes> planes_of(const FixedPoint& x) {
  return {Codes::load(x.start),
          {Codes::load(x.high[0]), Codes::load(x.high[1])},
          {Codes::load(x.low[0]), Codes::load(x.low[1])}};
}

static inline float float_of_bits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Converts 32 columns to fixed point. The largest magnitude gets 14 bits, so that values above 1/64 of it are exact.
// Each group has a scale of its own, because single values can be a thousand times larger than the others.
static inline void fix_group(const bf16* x, int group, FixedPoint& out) {
  constexpr int kBits = 14, kInfinite = 255,
                kLeast = 14;  // smaller magnitudes count as 2^-113, so that scales stay normal
  int largest = 0;
  for (int i = 0; i < kGroup; i++) largest = std::max(largest, x[i].bits & 0x7fff);
  const int exponent = std::max(largest >> 7, kLeast);
  int whole[kGroup] = {};
  out.scales[group] = float_of_bits(0x7fc00000);
  if (exponent < kInfinite) {  // Inf and NaN become a NaN of the whole token
    out.scales[group] = float_of_bits(uint32_t(exponent - (kBits - 1)) << 23);
    const float factor = float_of_bits(uint32_t(254 + kBits - 1 - exponent) << 23);
    for (int i = 0; i < kGroup; i++) whole[i] = round_even(to_float(x[i]) * factor);
  }
  for (int half = 0; half < 2; half++)
    for (int i = 0; i < 16; i++) {
      out.high[half][group * 16 + i] = int8_t(whole[half * 16 + i] >> 7);
      out.low[half][group * 16 + i] = int8_t(whole[half * 16 + i] & 127);
    }
}

// Converts one row of a strip's pieces; columns beyond its last one become zeros.
template <class V>
void fix_row(const bf16* at, int cols, FixedPoint* out, int apart) {
  using Codes = typename V::Codes;
  constexpr bf16 kNothing[kGroup] = {};
  alignas(64) uint8_t bytes[kRowBytes];
  std::fill_n(bytes, kRowBytes, uint8_t(1));
  const auto ones = Codes::load(bytes);
  for (int begin = 0; begin < cols; begin += kFixedPointCols, out += apart) {
    for (int g = 0; g < 4; g++, at += kPieceElements) fix_group(begin + g * kGroup < cols ? at : kNothing, g, *out);
    std::fill_n(out->start, 16, 0);
    Codes::store(out->start, planes_of<Codes>(*out).dot(ones, ones));
    for (int32_t& sum : out->start) sum = -sum;
  }
}

// Whether dot_tile prefetches line by line, which is faster than a whole tile at once. Only for one token: with more,
// GCC 12 would not keep their planes in registers (nor if dot_tile were inlined), which halves the speed.
template <int M>
constexpr bool kSpreads = M == 1;

// Adds the products of one tile and its columns of M tokens to sums[r][t]. With kSpreads, prefetches a tile at `ahead`.
template <class V, class Codec, int M>
__attribute__((noinline)) void dot_tile(const uint8_t* tile, const FixedPoint* x, const uint8_t* ahead, float* sums) {
  using Codes = typename V::Codes;
  alignas(64) float scales[M][kTileRows * 4];
  for (int t = 0; t < M; t++)
    for (int i = 0; i < kTileRows * 4; i++) scales[t][i] = Codec::template group_scale<V>(tile, i) * x[t].scales[i % 4];
  const auto table = Codes::load(Codec::kWholeValues.at);
  Planes<Codes> planes[M];
  for (int t = 0; t < M; t++) planes[t] = planes_of<Codes>(x[t]);
  if constexpr (kSpreads<M>) prefetch(ahead + kCodeBytes, info(Codec::kFormat).tile_bytes - kCodeBytes);
  for (int r = 0; r < kTileRows; r++) {
    if constexpr (kSpreads<M>) prefetch(ahead + r * kRowBytes);
    const auto codes = Codes::load(tile + r * kRowBytes);
    const auto first = Codes::low_values(table, codes), second = Codes::high_values(table, codes);
    for (int t = 0; t < M; t++)
      Codes::add_scaled(sums + (r * M + t) * 16, planes[t].dot(first, second), scales[t] + r * 4);
  }
}

}  // namespace ktft
