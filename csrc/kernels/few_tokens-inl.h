// The forward GEMM of tile ISAs for so few tokens that each weight is used about as often as it is read: a tile product
// would wait for decoded weights to be stored and loaded again, and use few of its columns. Dot products of rows of W
// with rows of X on vectors do neither.
#pragma once

#include <algorithm>

#include "kernels/kernels.h"
#include "quant/codecs.h"

namespace ktft {

template <class V, class Codec>
constexpr bool kDecodesRows = requires { typename Codec::template Rows<V>; };

// Tokens up to which this is faster than tiles, as measured.
constexpr int kMostDotTokens[kFormats] = {0, 2, 2, 1, 2, 1};
constexpr int kDotPieces = 16;          // of a strip, decoded at a time: 16 KB of L1
constexpr int kDotAhead = 8 << 10;      // bytes that weights are fetched ahead; strips follow each other in memory
constexpr int kDotRows[] = {0, 16, 8};  // of W for each number of tokens: as many sums as stay in registers

// Memory of one piece; tiles' parts that are not pieces count with them.
template <class Codec>
constexpr int kPieceBytes = info(Codec::kFormat).tile_bytes / (info(Codec::kFormat).tile_cols / 32);

// Rows of X out of their turned strip: pair i of a piece of token t is dword 16 i + t.
template <int M>
void unturn_rows(const bf16* strip, int cols, bf16* out) {
  for (int t = 0; t < M; t++)
    for (int pair = 0; pair < cols / 2; pair++)
      std::memcpy(out + t * cols + pair * 2, strip + (pair * 16 + t) * 2, 2 * sizeof(bf16));
}

// sums[r][t] += the lanes of W[row + r, begin ..) X[t, begin ..) for `pieces` pieces. `weights`: decoded; null when
// rows are decoded here. `ahead`: memory to fetch meanwhile, or null.
template <class V, class Codec, int R, int M>
void dot_rows(const PackedMatrix& w, int strip, int row, const bf16* weights, const bf16* x, int begin, int pieces,
              const char* ahead, float* sums) {
  typename V::F acc[R][M];
  for (int r = 0; r < R; r++)
    for (int t = 0; t < M; t++) acc[r][t] = V::load(sums + ((row + r) * M + t) * V::kWidth);
  for (int p = 0; p < pieces; p++) {
    const bf16* const in = x + begin + p * 32;
    if (ahead) prefetch(ahead + p * kPieceBytes<Codec>, kPieceBytes<Codec>);
    if constexpr (Codec::kFormat == Format::kInt8) {
      const int col = begin + p * 32;
      const uint8_t* const tile = w.tile(strip, col / 64) + col % 64;
      for (int s = 0; s < 32; s += V::kWidth) {
        typename V::F tokens[M];
        for (int t = 0; t < M; t++) tokens[t] = V::load(in + t * w.cols + s);
        for (int r = 0; r < R; r++) {
          const typename V::F row_of_w =
              V::load_int8(reinterpret_cast<const int8_t*>(tile) + (row + r) * kRowBytes + s);
          for (int t = 0; t < M; t++) acc[r][t] = V::fma(row_of_w, tokens[t], acc[r][t]);
        }
      }
    } else if constexpr (kDecodesRows<V, Codec>) {
      const typename Codec::template Rows<V> decode;
      typename V::In tokens[M];
      for (int t = 0; t < M; t++) tokens[t] = V::load_in(in + t * w.cols);
      for (int r = 0; r < R; r++) {
        const typename V::In row_of_w = decode(w, strip, begin / 32 + p, row + r);
        for (int t = 0; t < M; t++) acc[r][t] = V::dot(acc[r][t], tokens[t], row_of_w);
      }
    } else {
      const bf16* const piece = weights + p * kPieceElements;
      for (int s = 0; s < 32; s += V::kStep) {
        typename V::In tokens[M];
        for (int t = 0; t < M; t++) tokens[t] = V::load_in(in + t * w.cols + s);
        for (int r = 0; r < R; r++) {
          const typename V::In row_of_w = V::load_in(piece + (row + r) * 32 + s);
          for (int t = 0; t < M; t++) acc[r][t] = V::dot(acc[r][t], tokens[t], row_of_w);
        }
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < M; t++) V::store(sums + ((row + r) * M + t) * V::kWidth, acc[r][t]);
}

// sums += the lanes of one strip of W and all of X. `panel` has room for kDotPieces.
template <class V, class Codec, int M>
void dot_strip(const PackedMatrix& w, int strip, const bf16* x, bf16* panel, float* sums) {
  constexpr bool kInPlace = Codec::kFormat == Format::kBf16;
  constexpr bool kRows = Codec::kFormat == Format::kInt8 || kDecodesRows<V, Codec>;
  constexpr int R = kDotRows[M];
  const char* ahead = reinterpret_cast<const char*>(w.tile(strip, 0)) + kDotAhead;
  for (int begin = 0; begin < w.cols; begin += kDotPieces * 32, ahead += kDotPieces * kPieceBytes<Codec>) {
    const int pieces = std::min(kDotPieces, (w.cols - begin) / 32);
    const bf16* weights = nullptr;
    if constexpr (kInPlace) {
      weights = Codec::template decode<V>(w, strip, begin / 32, panel);
    } else if constexpr (!kRows) {
      for (int p = 0; p < pieces; p++) {
        prefetch(ahead + p * kPieceBytes<Codec>, kPieceBytes<Codec>);
        Codec::template decode<V>(w, strip, begin / 32 + p, panel + p * kPieceElements);
      }
      weights = panel;
    }
    for (int row = 0; row < kTileRows; row += R)
      dot_rows<V, Codec, R, M>(w, strip, row, weights, x, begin, pieces, row == 0 && kRows ? ahead : nullptr, sums);
  }
}

template <class V, class Codec, int M>
void dot_forward(const GemmArgs& a) {
  bf16* const panel = reinterpret_cast<bf16*>(a.scratch);
  bf16* const x = panel + kDotPieces * kPieceElements;
  alignas(64) float sums[kTileRows * M * V::kWidth];
  for (int i = 0; i < a.count; i++) {
    const GemmTerm& term = a.terms[i];
    const PackedMatrix& w = *term.w;
    if (i == 0 || term.x != a.terms[i - 1].x) unturn_rows<M>(term.x, w.cols, x);
    bf16* const low_rank = x + M * w.cols;
    if (term.lora) unturn_rows<M>(term.low_rank, term.lora->cols, low_rank);
    for (int out = 0; out < a.out_count; out += kTileRows) {
      std::fill(std::begin(sums), std::end(sums), 0.f);
      if (term.lora) dot_strip<V, Bf16Codec, M>(*term.lora, (term.lora_begin + out) / kTileRows, low_rank, panel, sums);
      dot_strip<V, Codec, M>(w, (term.out_begin + out) / kTileRows, x, panel, sums);
      float* const c = term.c + result_piece(out / 32, 0, a.tokens) + out % 32 * 16;
      std::fill(c, c + kTileRows * 16, 0.f);
      for (int r = 0; r < kTileRows; r++)
        for (int t = 0; t < M; t++) c[r * 16 + t] = V::sum(V::load(sums + (r * M + t) * V::kWidth));
    }
  }
}

// Whether few_tokens_forward takes the call: its rows of X lie in the scratch memory behind the decoded pieces.
template <class Codec>
bool few_tokens(const GemmArgs& a) {
  const int64_t low_rank = a.terms[0].lora ? a.terms[0].lora->cols : 0;
  const int64_t bytes = (kDotPieces * kPieceElements + a.tokens * (a.terms[0].w->cols + low_rank)) * int(sizeof(bf16));
  return a.tokens <= kMostDotTokens[int(Codec::kFormat)] && bytes <= int64_t(kGemmScratch);
}

template <class V, class Codec>
void few_tokens_forward(const GemmArgs& a) {
  if (a.tokens == 1) return dot_forward<V, Codec, 1>(a);
  dot_forward<V, Codec, 2>(a);
}

}  // namespace ktft
