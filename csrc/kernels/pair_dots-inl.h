// Dot products of rows of W with more than kFewRows and up to kMostDots rows of X, on ISAs with products of pairs of
// bf16 and without tiles, for int8. Two rows of W at a time are decoded in registers, once for up to eight tokens:
// fewer instructions than products of bytes (code_dots-inl.h), and no panel to store and load. 4-bit codes are as fast
// by bytes.
#pragma once

#include "kernels/code_dots-inl.h"

namespace ktft {

template <class V, class Codec>
constexpr bool kDotsPairs =
    kDotsCodes<V, Codec> && !kHasTiles<V> && requires { Codec::template pairs<V>(nullptr, 0, 0); };

constexpr int kPairTokens = 8;   // with two rows of W, their sums stay in registers
constexpr int kPairBlock = 512;  // columns at a time: eight tokens (8 KB), a strip's codes and its sums stay in L1

template <class Codec>
constexpr int64_t kPairAhead = int64_t(kPairBlock / info(Codec::kFormat).tile_cols) * info(Codec::kFormat).tile_bytes;

// Adds the products of W[row ..) and W[row + 1 ..) over a block's `pieces` and M tokens to sums[r * M + t].
template <class V, class Codec, int M>
void dot_pair_rows(const uint8_t* tile, int row, const bf16* const* x, int begin, int pieces, typename V::F* sums) {
  constexpr int kInTile = info(Codec::kFormat).tile_cols / 32;
  typename V::F acc[2][M];
  sums += row * M;
#pragma GCC unroll 2
  for (int r = 0; r < 2; r++)
#pragma GCC unroll 8
    for (int t = 0; t < M; t++) acc[r][t] = sums[r * M + t];
  for (int p = 0; p < pieces; p++) {
    const uint8_t* const at = tile + p / kInTile * info(Codec::kFormat).tile_bytes;
    const typename V::In first = Codec::template pairs<V>(at, row, p % kInTile);
    const typename V::In second = Codec::template pairs<V>(at, row + 1, p % kInTile);
#pragma GCC unroll 8
    for (int t = 0; t < M; t++) {
      const typename V::In in = V::load_in(x[t] + begin + p * 32);
      acc[0][t] = V::dot(acc[0][t], in, first);
      acc[1][t] = V::dot(acc[1][t], in, second);
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < 2; r++)
#pragma GCC unroll 8
    for (int t = 0; t < M; t++) sums[r * M + t] = acc[r][t];
}

// Adds the products of a strip of W and M rows of X, x[t], to results[r * all + t]. ahead(block) is the memory to
// prefetch while a block is multiplied.
template <class V, class Codec, int M, class Ahead>
void dot_pairs(const uint8_t* tile, int cols, const bf16* const* x, const Ahead& ahead, int all, float* results) {
  constexpr FormatInfo format = info(Codec::kFormat);
  typename V::F sums[kTileRows * M];
  for (typename V::F& sum : sums) sum = V::zero();
  for (int begin = 0; begin < cols; begin += kPairBlock) {
    const int columns = std::min(kPairBlock, cols - begin);
    const int64_t bytes = int64_t(ceil_div(columns, format.tile_cols)) * format.tile_bytes,
                  share = bytes / kTileRows * 2;
    const uint8_t* const next = ahead(tile);
    for (int row = 0; row < kTileRows; row += 2) {
      if (next) prefetch(next + row / 2 * share, size_t(share));
      dot_pair_rows<V, Codec, M>(tile, row, x, begin, columns / 32, sums);
    }
    tile += bytes;
  }
  for (int r = 0; r < kTileRows; r++)
    for (int t = 0; t < M; t++) results[r * all + t] += V::sum(sums[r * M + t]);
}

// The same for any number of tokens from kFewRows on, in two runs above kPairTokens.
template <class V, class Codec, class Ahead>
void dot_pairs_strip(const uint8_t* tile, int cols, const bf16* const* x, int tokens, const Ahead& ahead,
                     float* results) {
  const int first = tokens > kPairTokens ? (tokens + 1) / 2 : tokens;
  for (int t = 0; t < tokens; t += first) {
    const auto run = [&]<int M>() {
      dot_pairs<V, Codec, M>(
          tile, cols, x + t, [&](const uint8_t* at) { return t ? nullptr : ahead(at); }, tokens, results + t);
    };
    switch (std::min(first, tokens - t)) {
      case 4: run.template operator()<4>(); break;
      case 5: run.template operator()<5>(); break;
      case 6: run.template operator()<6>(); break;
      case 7: run.template operator()<7>(); break;
      default: run.template operator()<kPairTokens>();
    }
  }
}

}  // namespace ktft
