// The forward GEMM with int8 activations, for 4-bit formats: a call that asks for 8-bit activations and has more tokens
// than dot products are for. W is decoded to bytes that lie as instructions take them, four columns of 16 outputs at a
// time, and each row of X has a scale for every 32 columns.
#pragma once

#include <algorithm>

#include "kernels/code_dots-inl.h"
#include "kernels/float_gemm-inl.h"

namespace ktft {

template <class V, class Codec>
constexpr bool kHasByteGemm = [] {
  if constexpr (kDotsBytes<V, Codec> && !kHasTiles<V> && requires { V::Codes::kOutputs; })
    return V::Codes::kOutputs == V::kWidth;
  return false;
}();

// Up to two strips' reduction blocks (16 KB) and their scales stay in L1, 128 tokens' (80 or 144 KB) in L2.
constexpr int kByteReduction = 512, kByteTokens = 128;
constexpr int kByteVectors = 2;  // of outputs

template <class Codes>
constexpr int kByteStrips = kByteVectors * Codes::kOutputs / kTileRows;

template <class Codes>
struct ByteRow {
  static constexpr int kGroups = kByteReduction / kGroup;
  alignas(64) typename Codes::Inputs values[kByteReduction / 4];
  float scales[kGroups];
  int32_t starts[kGroups];  // what the 128 added to the values of W adds to a group's sum, negated

  // A row of pieces. Only as many columns as there are get values.
  void fix(const bf16* x, int groups) {
    for (int g = 0; g < groups; g++, x += kPieceElements) {
      const GroupScale found = byte_scale(Codes::largest_magnitude(x));
      alignas(64) int8_t bytes[kGroup] = {};
      scales[g] = found.scale;
      starts[g] = found.factor ? -Codes::kOffset * Codes::round_group(x, found.factor, bytes) : 0;
      Codes::place_inputs(bytes, values + g * (kGroup / 4));
    }
  }
};

// 16 outputs' weights of a reduction block. Dword r of values[i][half][4 g + q] has the four columns of group 4 i + g
// of W that begin at 16 half + 4 q.
struct BytePanel {
  static constexpr int kTiles = kByteReduction / 128;
  alignas(64) uint8_t values[kTiles][2][16][kRowBytes];
  alignas(64) float scales[kTiles * 4][kTileRows];

  template <class V, class Codec>
  void decode(const uint8_t* tile, int tiles) {
    using Codes = typename V::Codes;
    const auto table = Codes::table(Codec::kWholeValues.at);
    for (int i = 0; i < tiles; i++, tile += info(Codec::kFormat).tile_bytes) {
      alignas(64) uint8_t rows[2][kTileRows][kRowBytes];
      alignas(64) float own[kTileRows * 4];
      for (int k = 0; k < kTileRows * 4; k++) own[k] = Codec::template group_scale<V>(tile, k);
      Codes::columns_of_four(own, scales[i * 4]);
      for (int r = 0; r < kTileRows; r++) {
        const auto codes = Codes::load(tile + r * kRowBytes);
        Codes::store(rows[0][r], Codes::low_values(table, codes));
        Codes::store(rows[1][r], Codes::high_values(table, codes));
      }
      for (int half = 0; half < 2; half++) V::transpose_dwords(rows[half], kRowBytes, values[i][half], kRowBytes);
    }
  }
};

// Adds the products of two vectors of outputs, in one or two panels, and R rows of X to c, whose rows are 32 elements
// apart.
template <class V, int R>
void byte_products(const BytePanel* w, const ByteRow<typename V::Codes>* x, int groups, float* c) {
  using Codes = typename V::Codes;
  constexpr int kOutputs = Codes::kOutputs, kInPanel = kTileRows / kOutputs;
  typename V::F acc[R][kByteVectors];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kByteVectors; v++) acc[r][v] = V::load(c + r * 32 + v * kOutputs);
  for (int g = 0; g < groups; g++) {
    typename Codes::Outputs sums[R][kByteVectors];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kByteVectors; v++) sums[r][v] = Codes::all_outputs(x[r].starts[g]);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      const int half = i / 4, four = g % 4 * 4 + i % 4;
      typename Codes::Outputs of_w[kByteVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kByteVectors; v++)
        of_w[v] = Codes::load_outputs(w[v / kInPanel].values[g / 4][half][four] + v % kInPanel * kOutputs * 4);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < kByteVectors; v++)
          sums[r][v] = in_register<V>(Codes::add_products(sums[r][v], of_w[v], x[r].values[g * (kGroup / 4) + i]));
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const typename V::F scale = V::set1(x[r].scales[g]);
#pragma GCC unroll 2
      for (int v = 0; v < kByteVectors; v++)
        acc[r][v] = V::fma(Codes::to_float(sums[r][v]),
                           V::mul(V::load(w[v / kInPanel].scales[g] + v % kInPanel * kOutputs), scale), acc[r][v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kByteVectors; v++) V::store(c + r * 32 + v * kOutputs, acc[r][v]);
}

// C += X W^T for all terms, which share X.
template <class V, class Codec>
void forward_in_bytes(const GemmArgs& a) {
  using Codes = typename V::Codes;
  constexpr int kStrips = kByteStrips<Codes>;
  BytePanel* const panels = reinterpret_cast<BytePanel*>(a.scratch);
  ByteRow<Codes>* const rows = reinterpret_cast<ByteRow<Codes>*>(panels + kStrips);
  static_assert(kStrips * sizeof(BytePanel) + kByteTokens * sizeof(ByteRow<Codes>) <= kGemmScratch);
  const int cols = a.terms[0].w->cols;
  for (int begin = 0; begin < cols; begin += kByteReduction) {
    const int columns = std::min(kByteReduction, cols - begin), tiles = ceil_div(columns, 128);
    for (int token = 0; token < a.tokens; token += kByteTokens) {
      const int tokens = std::min(kByteTokens, a.tokens - token);
      for (int t = 0; t < tokens; t++) {
        const int row = token + t, first = row - row % kTileRows;
        rows[t].fix(a.terms[0].x + activation_elements(first, cols) + begin * kTileRows + row % kTileRows * 32,
                    columns / kGroup);
      }
      for (int i = 0; i < a.count; i++) {
        const GemmTerm& term = a.terms[i];
        for (int out = 0; out < a.out_count; out += kStrips * kTileRows) {
          for (int s = 0; s < kStrips; s++) {
            const int at = out + s * kTileRows;
            panels[s].template decode<V, Codec>(term.w->tile((term.out_begin + at) / kTileRows, begin / 128), tiles);
            const auto ahead = StripAhead<V, Codec>::after(*term.w, term.out_begin, term.out_begin + a.out_count,
                                                           term.out_begin + at, begin, kByteReduction);
            for (int quarter = 0; token == 0 && quarter < 4; quarter++) ahead.prefetch_quarter(quarter);
          }
          float* const c = term.c + result_piece(out / 32, token / kTileRows, a.tokens) + out % 32;
          each_run<Codes::kInputRows>(
              tokens, [&]<int R>(int t) { byte_products<V, R>(panels, rows + t, columns / kGroup, c + t * 32); });
        }
      }
    }
  }
}

}  // namespace ktft
