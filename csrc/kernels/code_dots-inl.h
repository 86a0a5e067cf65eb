// Dot products of rows of a 4-bit format's W with one or two rows of X, on bytes: codes become whole numbers by one
// look-up, X is in 15-bit fixed point, sums of a group are exact, and group scales multiply those. Decoding takes about
// four instructions for 128 weights, the products of a token nine.
//
// The format rounds a weight's product of code book and group scale to bf16; here nothing is rounded. That is up to
// 2^-9 of a weight, at random: 0.1% of an output.
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

// 128 columns of one token, x = scales[group] * (128 high + low), in the order of a tile's codes: [0] has what meets
// the low halves of its bytes, [1] the high ones. `start` takes back the 128 that code values have on top, so that
//   W . X of lane i = sum_groups scale * (128 (start[i] + values . high) + values . low)
struct alignas(64) FixedPoint {
  int8_t high[2][kRowBytes], low[2][kRowBytes];
  int32_t start[16];
  float scales[4];
};
constexpr int kFixedPointCols = 128;

static inline float float_of_bits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// 32 columns. The largest magnitude gets 14 bits, so that what is over 1/64 of it is exact. A scale a group,
// because single values can be a thousand times the others.
static inline void fix_group(const bf16* x, int group, FixedPoint& out) {
  constexpr int kBits = 14, kInfinite = 255, kLeast = 14;  // below 2^-113 all is taken for it: scales stay normal
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
  for (int lane = 0; lane < 4; lane++) {
    int sum = 0;
    for (int i = lane * 4; i < lane * 4 + 4; i++) sum += whole[i] + whole[16 + i];
    out.start[group * 4 + lane] = -sum;
  }
}

// x of one token, piece by piece.
template <class Piece>
void fix_token(int cols, const Piece& piece, FixedPoint* out, int apart) {
  for (int begin = 0; begin < cols; begin += kFixedPointCols, out += apart) {
    for (int g = 0; g < 4; g++) {
      alignas(64) bf16 x[kGroup] = {};
      if (begin + g * kGroup < cols) piece(begin / kGroup + g, x);
      fix_group(x, g, *out);
    }
  }
}

// sums[r][t] += the lanes of one tile and its columns of M tokens.
template <class V, class Codec, int M>
void dot_tile(const uint8_t* tile, const FixedPoint* x, float* sums) {
  using Codes = typename V::Codes;
  using Bytes = typename Codes::Bytes;
  alignas(64) float scales[M][kTileRows * 4];
  for (int t = 0; t < M; t++)
    for (int i = 0; i < kTileRows * 4; i++) scales[t][i] = Codec::template group_scale<V>(tile, i) * x[t].scales[i % 4];
  const Bytes table = Codes::load(Codec::kWholeValues.at);
  Bytes start[M], high[M][2], low[M][2];
  for (int t = 0; t < M; t++) {
    start[t] = Codes::load(x[t].start);
    for (int half = 0; half < 2; half++) {
      high[t][half] = Codes::load(x[t].high[half]);
      low[t][half] = Codes::load(x[t].low[half]);
    }
  }
  for (int r = 0; r < kTileRows; r++) {
    const Bytes codes = Codes::load(tile + r * kRowBytes);
    const Bytes values[2] = {Codes::low_values(table, codes), Codes::high_values(table, codes)};
    for (int t = 0; t < M; t++) {
      Bytes sum = Codes::dot(Codes::dot(start[t], values[0], high[t][0]), values[1], high[t][1]);
      sum = Codes::dot(Codes::dot(Codes::times_128(sum), values[0], low[t][0]), values[1], low[t][1]);
      Codes::add_scaled(sums + (r * M + t) * 16, sum, scales[t] + r * 4);
    }
  }
}

}  // namespace ktft
