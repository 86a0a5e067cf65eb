// The forward GEMM with int8 activations (kernels/integer_gemm-inl.h), for 4-bit formats and int8: a call that asks for
// 8-bit activations and has more tokens than dot products are for. An instruction takes four columns of an output.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/code_dots-inl.h"
#include "kernels/integer_gemm-inl.h"

namespace ktft {

// Where int8 is multiplied as words, in twice as many bits, bytes take as long: measured.
template <class V, class Codec>
constexpr bool kHasByteGemm = [] {
  if constexpr (Codec::kFormat == Format::kInt8 && requires { typename V::Words; }) return false;
  if constexpr (kDotsCodes<V, Codec> && !kHasTiles<V> && requires { V::Codes::kOutputs; })
    return V::Codes::kOutputs == V::kWidth;
  return false;
}();

template <class V>
struct ByteProducts {
  using Codes = typename V::Codes;
  static constexpr int kReduction = 512, kInputRows = Codes::kInputRows;
  static constexpr int kGroups = kReduction / kGroup, kFours = kGroup / 4;

  struct Row {
    alignas(64) typename Codes::Inputs fours[kGroups][kFours];
    float scales[kGroups];
    int32_t starts[kGroups];  // what a group's sums begin with

    void fix(const bf16* x, int g) {
      const GroupScale found = byte_scale(Codes::largest_magnitude(x));
      scales[g] = found.scale;
      starts[g] = found.factor ? Codes::round_group(x, found.factor, fours[g]) : 0;
      if (!found.factor) std::fill_n(fours[g], kFours, typename Codes::Inputs{});
    }
  };

  // Four columns of group 4 i + g that begin at 16 half + 4 q are in fours[i][half][4 g + q], output by output.
  struct Panel {
    alignas(64) uint8_t fours[kGroups / 4][2][16][kPanelStrips][kRowBytes];
    alignas(64) float scales[kGroups][kPanelOutputs];
  };

  template <class Codec>
  static void decode(const PackedMatrix& w, int strip, int begin, int groups, int s, Panel& panel) {
    if constexpr (Codec::kFormat == Format::kInt8)
      copy_bytes(w, strip, begin, groups, s, panel);
    else
      decode_nibbles<Codec>(w, strip, begin, groups, s, panel);
  }

  // The codes are the values; a row's scale multiplies results.
  static void copy_bytes(const PackedMatrix& w, int strip, int begin, int groups, int s, Panel& panel) {
    const uint8_t* tile = w.tile(strip, begin / 64);
    for (int i = 0; i < ceil_div(groups, 2); i++, tile += kCodeBytes) {
      alignas(64) uint8_t rows[kTileRows][kRowBytes], fours[16][kRowBytes];
      for (int r = 0; r < kTileRows; r++) Codes::store(rows[r], Codes::values(Codes::load(tile + r * kRowBytes)));
      V::transpose_dwords(rows, kRowBytes, fours, kRowBytes);
      for (int d = 0; d < 16; d++)
        std::memcpy(panel.fours[i / 2][d / 4 % 2][i % 2 * 8 + d / 8 * 4 + d % 4][s], fours[d], kRowBytes);
      for (int g = 0; g < 2; g++) std::fill_n(panel.scales[i * 2 + g] + s * kTileRows, kTileRows, 1.f);
    }
  }

  template <class Codec>
  static void decode_nibbles(const PackedMatrix& w, int strip, int begin, int groups, int s, Panel& panel) {
    const auto table = Codes::table(Codec::kWholeValues.at);
    const uint8_t* tile = w.tile(strip, begin / 128);
    for (int i = 0; i < ceil_div(groups, 4); i++, tile += info(Codec::kFormat).tile_bytes) {
      alignas(64) uint8_t rows[2][kTileRows][kRowBytes];
      alignas(64) float scales[kTileRows * 4];
      for (int k = 0; k < kTileRows * 4; k++) scales[k] = Codec::template group_scale<V>(tile, k);
      Codes::columns_of_four(scales, panel.scales[i * 4] + s * kTileRows, kPanelOutputs);
      for (int r = 0; r < kTileRows; r++) {
        const auto codes = Codes::load(tile + r * kRowBytes);
        Codes::store(rows[0][r], Codes::low_values(table, codes));
        Codes::store(rows[1][r], Codes::high_values(table, codes));
      }
      for (int half = 0; half < 2; half++)
        V::transpose_dwords(rows[half], kRowBytes, panel.fours[i][half][0][s], kPanelStrips * kRowBytes);
    }
  }

  template <int R>
  static void products(const Panel& w, const Row* x, int groups, float* c) {
    constexpr int kOutputs = Codes::kOutputs, kVectors = kPanelOutputs / kOutputs;
    typename V::F acc[R][kVectors];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) acc[r][v] = V::load(c + r * 32 + v * kOutputs);
    for (int g = 0; g < groups; g++) {
      typename Codes::Outputs sums[R][kVectors];
#pragma GCC unroll 6
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) sums[r][v] = Codes::all_outputs(x[r].starts[g]);
      const auto of_group = &w.fours[g / 4][0][g % 4 * 4];
#pragma GCC unroll 8
      for (int i = 0; i < kFours; i++) {
        const uint8_t* const four = of_group[i / 4 * 16 + i % 4][0];
        typename Codes::Outputs of_w[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) of_w[v] = Codes::load_outputs(four + v * kOutputs * 4);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; v++)
            sums[r][v] = in_register<V>(Codes::add_products(sums[r][v], of_w[v], x[r].fours[g][i]));
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const typename V::F scale = V::set1(x[r].scales[g]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++)
          acc[r][v] =
              V::fma(Codes::to_float(sums[r][v]), V::mul(V::load(w.scales[g] + v * kOutputs), scale), acc[r][v]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) V::store(c + r * 32 + v * kOutputs, acc[r][v]);
  }
};

}  // namespace ktft
