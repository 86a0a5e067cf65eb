// Dot products of rows of W with a few rows of X, computed on bytes, for W in a 4-bit format or int8. X is in fixed
// point, of 15 bits in two terms or of 8 in one, the sums of a group are exact, and the group's scales multiply them.
//
// 4-bit codes become integers by one look-up: with AVX-512 decoding 128 weights takes six instructions, the products of
// one token ten. The rounding of a weight to bf16, which is part of these formats, is left out. The difference is up to
// 2^-9 of a weight, at random, which is 0.1% of an output. int8's codes are the integers, and nothing is left out.
#pragma once

#include <algorithm>

#include "kernels/epilogue-inl.h"
#include "kernels/kernels.h"
#include "quant/codecs.h"

namespace ktft {

template <class V, class Codec>
constexpr bool kDotsCodes =
    requires { typename V::Codes; } && (requires { Codec::kWholeValues; } || Codec::kFormat == Format::kInt8);

// Whether X may have one term, for calls that ask for 8-bit activations. int8 gains nothing by that with few tokens:
// measured. With many, byte_gemm-inl.h is for int8, or w8a8.h where there are tiles.
template <class V, class Codec>
constexpr bool kDotsBytes = kDotsCodes<V, Codec> && requires { Codec::kWholeValues; };

// Whether the scales of W's groups are integers that multiply pairs of products, which is free where pairs are
// multiplied by ones otherwise. Only X's scales are left, the same for all rows of W.
template <class V, class Codec>
constexpr bool kWeighsPairs = requires { V::Codes::pair_weights(nullptr); } && requires { Codec::kLargestSub; };

// Columns of one token in the order of a tile's bytes, x = scale * (128 terms[0] + terms[1]), or x = scale * terms[0]
// if that is all. `start` subtracts the 128 that is added to the values of W:
//   W . X of lane i = scale * (128 (start[i] + values . terms[0]) + values . terms[1])
// A tile of 4-bit codes has 128 columns: [0] is multiplied by the low halves of its bytes, [1] by the high halves. A
// tile of int8 has 64 columns. scales[i] is that of lane i, or, not by lanes, that of group i % 4, for four rows of W's
// scales.
template <int kBytes, int kParts, bool kOfLanes>
struct alignas(64) FixedPoint {
  static constexpr int kPlanes = kBytes, kTerms = kParts, kCols = kBytes * kRowBytes;
  static constexpr bool kByLanes = kOfLanes;
  int8_t terms[kParts][kBytes][kRowBytes];
  int32_t start[16];
  float scales[16];
};
constexpr int kExact = 2, kBytesOnly = 1;  // terms
template <class V, class Codec>
constexpr int kTermsOfBytes = kDotsBytes<V, Codec> ? kBytesOnly : kExact;  // where a call asks for 8 bits
template <class V, class Codec, int kTerms = kExact>
using FixedPointOf = FixedPoint<info(Codec::kFormat).tile_cols / kRowBytes, kTerms,
                                Codec::kFormat == Format::kInt8 || kWeighsPairs<V, Codec>>;

// The same values in registers.
template <class Codes, int kPlanes, int kTerms>
struct Planes {
  using Bytes = typename Codes::Bytes;
  Bytes start, terms[kTerms][kPlanes];

  Bytes dot(const Bytes& first, const Bytes& second) const {
    Bytes sum = Codes::dot(start, first, terms[0][0]);
    if constexpr (kPlanes == 2) sum = Codes::dot(sum, second, terms[0][1]);
    if constexpr (kTerms == kExact) {
      sum = Codes::dot_low(Codes::times_128(sum), first, terms[1][0]);
      if constexpr (kPlanes == 2) sum = Codes::dot_low(sum, second, terms[1][1]);
    }
    return sum;
  }

  // The same with pairs of products times the weights. |sum| < 2^31: 8 products of 127 * 128, times 64 * 128.
  Bytes weighed_dot(const Bytes& first, const Bytes& second, const Bytes& weights) const {
    const Bytes upper = kTerms == kExact ? Codes::times_128(weights) : weights;
    Bytes sum = Codes::dot(Codes::dot(start, first, terms[0][0], upper), second, terms[0][1], upper);
    if constexpr (kTerms == kExact)
      sum = Codes::dot_low(Codes::dot_low(sum, first, terms[1][0], weights), second, terms[1][1], weights);
    return sum;
  }
};

template <class Codes, class X>
Planes<Codes, X::kPlanes, X::kTerms> planes_of(const X& x) {
  Planes<Codes, X::kPlanes, X::kTerms> out{};
  if constexpr (Codes::kOffset != 0) out.start = Codes::load(x.start);
  for (int i = 0; i < X::kTerms; i++)
    for (int plane = 0; plane < X::kPlanes; plane++) out.terms[i][plane] = Codes::load(x.terms[i][plane]);
  return out;
}

static inline float float_of_bits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// The scale of 32 columns, and the factor that makes them whole numbers: the largest magnitude gets so many bits. With
// 14, values above 1/64 of it are exact. Each group has a scale of its own, because single values can be a thousand
// times larger than the others. Inf and NaN have no factor, and the scale NaN.
struct GroupScale {
  float scale, factor;
};
template <int kBits>
static inline GroupScale fixed_scale(int largest_magnitude) {
  constexpr int kInfinite = 255, kLeast = 14;  // smaller magnitudes count as 2^-113, so that scales stay normal
  const int exponent = std::max(largest_magnitude >> 7, kLeast);
  if (exponent >= kInfinite) return {float_of_bits(0x7fc00000), 0};
  return {float_of_bits(uint32_t(exponent - (kBits - 1)) << 23),
          float_of_bits(uint32_t(254 + kBits - 1 - exponent) << 23)};
}

// The same for 8 bits, of which the largest magnitude takes all.
static inline GroupScale byte_scale(int largest_magnitude) {
  constexpr int kInfinite = 255 << 7, kLeast = 14 << 7;
  if (largest_magnitude >= kInfinite) return {float_of_bits(0x7fc00000), 0};
  const float largest = float_of_bits(uint32_t(std::max(largest_magnitude, kLeast)) << 16);
  return {largest * (1.f / 127), 127 / largest};
}

// Places a group's integers where its codes are in a tile: 4-bit codes of columns i and 16 + i share a byte.
template <class Codes, class X>
void place_group(const bf16* x, int group, X& out) {
  constexpr int kPlanes = X::kPlanes, kTerms = X::kTerms, kLanes = 16 / (X::kCols / kGroup);
  const int largest = Codes::largest_magnitude(x);
  const GroupScale found = kTerms == kExact ? fixed_scale<14>(largest) : byte_scale(largest);
  if constexpr (X::kByLanes)
    std::fill_n(out.scales + group * kLanes, kLanes, found.scale);
  else
    for (int row = 0; row < 4; row++) out.scales[row * 4 + group] = found.scale;
  for (int half = 0; half < 2; half++) {
    const int plane = kPlanes == 2 ? half : 0, at = kPlanes == 2 ? group * 16 : group * kGroup + half * 16;
    if (!found.factor)
      for (auto& term : out.terms) std::fill_n(term[plane] + at, 16, int8_t(0));
    else if constexpr (kTerms == kExact)
      Codes::split(x + half * 16, found.factor, out.terms[0][plane] + at, out.terms[1][plane] + at);
    else
      Codes::round(x + half * 16, found.factor, out.terms[0][plane] + at);
  }
}

// Converts one row, whose groups of 32 columns are `stride` elements apart; columns beyond its last one become zeros.
template <class V, class X>
void fix_row(const bf16* at, int cols, int stride, X* out) {
  using Codes = typename V::Codes;
  alignas(64) constexpr bf16 kNothing[kGroup] = {};
  constexpr int kCols = X::kCols, kAdded = X::kTerms == kExact ? 1 : Codes::kOffset;
  alignas(64) uint8_t bytes[kRowBytes];
  std::fill_n(bytes, kRowBytes, uint8_t(1));
  const auto ones = Codes::load(bytes);
  for (int begin = 0; begin < cols; begin += kCols, out++) {
    for (int g = 0; g < kCols / kGroup; g++, at += stride)
      place_group<Codes>(begin + g * kGroup < cols ? at : kNothing, g, *out);
    std::fill_n(out->start, 16, 0);
    if constexpr (Codes::kOffset == 0) continue;
    Codes::store(out->start, planes_of<Codes>(*out).dot(ones, ones));
    for (int32_t& sum : out->start) sum *= -kAdded;
  }
}

// Whether dot_tile prefetches line by line, which is faster than a whole tile at once. Only for one token: with more,
// GCC 12 would not keep their planes in registers (nor if dot_tile were inlined), which halves the speed.
template <int M>
constexpr bool kSpreads = M == 1;

// Adds the products of one tile and its columns of M tokens, x[t], to sums[r * all + t]. Prefetches a tile at `ahead`,
// unless that is null.
template <class V, class Codec, int M, class X>
__attribute__((noinline)) void dot_tile(const uint8_t* tile, const X* const* x, const uint8_t* ahead, int all,
                                        float* sums) {
  using Codes = typename V::Codes;
  constexpr int kPlanes = X::kPlanes, kBytes = info(Codec::kFormat).tile_bytes;
  constexpr bool kNibbles = kPlanes == 2, kWeighs = kWeighsPairs<V, Codec>;
  alignas(64) float scales[M][kTileRows * 4];
  if constexpr (kNibbles && !kWeighs) {
    alignas(64) float own[kTileRows * 4];
    for (int i = 0; i < kTileRows * 4; i++) own[i] = Codec::template group_scale<V>(tile, i);
    for (int t = 0; t < M; t++)
      for (int i = 0; i < kTileRows * 4; i += V::kWidth)
        V::store(scales[t] + i, V::mul(V::load(own + i), V::load(x[t]->scales + i % 16)));
  }
  Planes<Codes, kPlanes, X::kTerms> planes[M];
#pragma GCC unroll 4
  for (int t = 0; t < M; t++) planes[t] = planes_of<Codes>(*x[t]);
  typename Codes::Bytes table;
  if constexpr (kNibbles) table = Codes::table(Codec::kWholeValues.at);
  if (!kSpreads<M> && ahead) prefetch(ahead, kBytes);
  if (kSpreads<M> && kBytes > kCodeBytes) prefetch(ahead + kCodeBytes, kBytes - kCodeBytes);
  for (int r = 0; r < kTileRows; r++) {
    if constexpr (kSpreads<M>) prefetch(ahead + r * kRowBytes, kRowBytes);
    const auto codes = Codes::load(tile + r * kRowBytes);
    if constexpr (kNibbles) {
      const auto first = Codes::low_values(table, codes), second = Codes::high_values(table, codes);
      if constexpr (kWeighs) {
        const auto weights = Codes::pair_weights(tile + kCodeBytes + r * 4);
#pragma GCC unroll 4
        for (int t = 0; t < M; t++)
          Codes::add_scaled_lanes(sums + (r * all + t) * 16, planes[t].weighed_dot(first, second, weights),
                                  x[t]->scales);
      } else {
#pragma GCC unroll 4
        for (int t = 0; t < M; t++)
          Codes::add_scaled(sums + (r * all + t) * 16, planes[t].dot(first, second), scales[t] + r * 4);
      }
    } else {
      const auto values = Codes::values(codes);
#pragma GCC unroll 4
      for (int t = 0; t < M; t++)
        Codes::add_scaled_lanes(sums + (r * all + t) * 16, planes[t].dot(values, values), x[t]->scales);
    }
  }
}

// Whether the sums of a strip stay in registers, so that more products run while weights arrive.
template <class V, class Codec>
constexpr bool kKeepsSums = kDotsCodes<V, Codec> && requires { typename V::Codes::Sums; };

// Adds the products of a strip of int8 and one row of X to results[r]. While a tile is multiplied, ahead.of(tile) is
// prefetched.
template <class V, class Codec, class X, class Ahead>
void dot_byte_row(const uint8_t* tile, int tiles, const X* x, const Ahead& ahead, float* results) {
  using Codes = typename V::Codes;
  constexpr int kBytes = info(Codec::kFormat).tile_bytes;
  typename Codes::Sums sums[kTileRows];
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; r++) sums[r] = V::zero();
  for (int i = 0; i < tiles; i++, x++, tile += kBytes) {
    const uint8_t* const next = ahead.of(tile);
    const auto planes = planes_of<Codes>(*x);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; r++) {
      prefetch(next + r * kRowBytes, kRowBytes);
      const auto values = Codes::values(Codes::load(tile + r * kRowBytes));
      sums[r] = Codes::plus_scaled_lanes(sums[r], planes.dot(values, values), x->scales);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kTileRows; r += 4) V::add_sums(results + r, sums[r], sums[r + 1], sums[r + 2], sums[r + 3]);
}

// Adds the products of a strip of 4-bit codes and M rows of X, x[t], to results[r * all + t]. While a tile is
// multiplied, ahead.of(tile) is prefetched. Lanes of four rows are added up before they become floats: a quarter as
// many sums, so that those of several tokens fit in registers.
template <class V, class Codec, int M, class X, class Ahead>
void dot_nibbles(const uint8_t* tile, int tiles, const X* const* x, const Ahead& ahead, int all, float* results) {
  using Codes = typename V::Codes;
  constexpr int kFours = kTileRows / 4, kBytes = info(Codec::kFormat).tile_bytes;
  typename Codes::Sums sums[M][kFours];
#pragma GCC unroll 32
  for (int i = 0; i < M * kFours; i++) sums[i / kFours][i % kFours] = V::zero();
  const auto table = Codes::table(Codec::kWholeValues.at);
  for (int i = 0; i < tiles; i++, tile += kBytes) {
    const uint8_t* const next = ahead.of(tile);
    alignas(64) float own[kTileRows * 4];
    for (int k = 0; k < kTileRows * 4; k++) own[k] = Codec::template group_scale<V>(tile, k);
    typename Codes::Sums of_x[M];
#pragma GCC unroll 8
    for (int t = 0; t < M; t++) of_x[t] = Codes::by_fours(x[t][i].scales, false);
    prefetch(next + kCodeBytes, kBytes - kCodeBytes);
#pragma GCC unroll 4
    for (int q = 0; q < kFours; q++) {
      const auto scales = Codes::by_fours(own + q * 16, true);
      typename Codes::Bytes first[4], second[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) {
        const int at = (q * 4 + k) * kRowBytes;
        prefetch(next + at, kRowBytes);
        const auto codes = Codes::load(tile + at);
        first[k] = Codes::low_values(table, codes), second[k] = Codes::high_values(table, codes);
      }
#pragma GCC unroll 8
      for (int t = 0; t < M; t++) {
        const auto planes = planes_of<Codes>(x[t][i]);
        const auto lanes = Codes::sum_fours(planes.dot(first[0], second[0]), planes.dot(first[1], second[1]),
                                            planes.dot(first[2], second[2]), planes.dot(first[3], second[3]));
        sums[t][q] = V::fma(Codes::to_float(lanes), V::mul(scales, of_x[t]), sums[t][q]);
      }
    }
  }
  for (int i = 0; i < M * kFours; i++) {
    alignas(16) float of_rows[4];
    Codes::sum_groups(sums[i / kFours][i % kFours], of_rows);
    for (int k = 0; k < 4; k++) results[(i % kFours * 4 + k) * all + i / kFours] += of_rows[k];
  }
}

}  // namespace ktft
