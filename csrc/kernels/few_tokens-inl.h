// The forward GEMM for a few tokens: dot products of rows of W with rows of X, on vectors. A tile product would have to
// store decoded weights and load them again, and would use few of its columns. Tile ISAs have this for most formats,
// the other ISAs for formats whose codes can be multiplied as integers (code_dots-inl.h).
#pragma once

#include <algorithm>

#include "kernels/byte_gemm-inl.h"
#include "kernels/code_dots-inl.h"
#include "kernels/epilogue-inl.h"
#include "kernels/kernels.h"
#include "kernels/pair_dots-inl.h"
#include "kernels/word_gemm-inl.h"
#include "quant/codecs.h"

namespace ktft {

constexpr int kDotAhead = 8 << 10;  // the distance of the prefetch in bytes; strips are contiguous in memory

constexpr int kDotRows[] = {0, 16, 8, 4, 4};  // rows of W at a time, by number of tokens: their sums stay in registers

// Bytes of one piece, including its share of the tile's group scales.
template <class Codec>
constexpr int kPieceBytes = info(Codec::kFormat).tile_bytes / (info(Codec::kFormat).tile_cols / 32);

// Between rows of X. Without it, the tokens of one column would share a few sets of the cache.
constexpr int kRowApart = 32;

// What a call prefetches: its own rows of W, which are contiguous, then those of its next product, and after the last
// one those of the thread's next call, where that is known (GemmArgs::next).
struct DotAhead {
  const uint8_t *end = nullptr, *next = nullptr;
  int64_t distance = kDotAhead;  // at most the bytes that come next

  const uint8_t* of(const uint8_t* at) const {
    const int64_t past = at + distance - end;
    return past < 0 ? at + distance : next ? next + past : at;
  }
};

// A row of a strip's pieces, and row t of a transposed strip, whose pair i is dword 16 i + t.
static inline void copy_row(const bf16* at, int cols, bf16* out) {
  for (int c = 0; c < cols; c += 32, at += kPieceElements) std::memcpy(out + c, at, 32 * sizeof(bf16));
}
static inline void copy_turned_row(const bf16* strip, int t, int cols, bf16* out) {
  for (int c = 0; c < cols; c += 2) std::memcpy(out + c, strip + c * 16 + t * 2, 2 * sizeof(bf16));
}

static inline int low_rank_cols(const GemmArgs& a) {
  int cols = 0;
  for (int i = 0; i < a.count; i++) cols = std::max(cols, a.terms[i].lora ? a.terms[i].lora->cols : 0);
  return cols;
}

// Adds the products of W[row + r, begin ..), decoded to `weights`, and x[t][begin ..) over `pieces` pieces to
// sums[r][t].
template <class V, int R, int M>
void dot_rows(int row, const bf16* weights, const bf16* const* x, int begin, int pieces, float* sums) {
  typename V::F acc[R][M];
  for (int r = 0; r < R; r++)
    for (int t = 0; t < M; t++) acc[r][t] = V::load(sums + ((row + r) * M + t) * V::kWidth);
  for (int p = 0; p < pieces; p++) {
    const int col = begin + p * 32;
    const bf16* const piece = weights + p * kPieceElements;
    for (int s = 0; s < 32; s += V::kStep) {
      typename V::In tokens[M];
      for (int t = 0; t < M; t++) tokens[t] = V::load_in(x[t] + col + s);
      for (int r = 0; r < R; r++) {
        const typename V::In row_of_w = V::load_in(piece + (row + r) * 32 + s);
        for (int t = 0; t < M; t++) acc[r][t] = V::dot(acc[r][t], tokens[t], row_of_w);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < M; t++) V::store(sums + ((row + r) * M + t) * V::kWidth, acc[r][t]);
}

// Adds the products of one strip of W and M rows of X, x[t], to results[r * all + t]. `panel` has room for kDotPieces
// pieces.
template <class V, class Codec, int M>
void dot_strip(const PackedMatrix& w, int strip, const bf16* const* x, bf16* panel, const DotAhead& further, int all,
               float* results) {
  constexpr int R = kDotRows[M];
  alignas(64) float sums[kTileRows * M * V::kWidth] = {};
  const uint8_t* tiles = w.tile(strip, 0);
  for (int begin = 0; begin < w.cols; begin += kDotPieces * 32, tiles += kDotPieces * kPieceBytes<Codec>) {
    const uint8_t* const ahead = further.of(tiles);
    const int pieces = std::min(kDotPieces, (w.cols - begin) / 32);
    const bf16* weights = panel;
    if constexpr (Codec::kFormat == Format::kBf16) {
      weights = Codec::template decode<V>(w, strip, begin / 32, panel);
    } else {
      for (int p = 0; p < pieces; p++) {
        prefetch(ahead + p * kPieceBytes<Codec>, kPieceBytes<Codec>);
        Codec::template decode<V>(w, strip, begin / 32 + p, panel + p * kPieceElements);
      }
    }
    for (int row = 0; row < kTileRows; row += R) dot_rows<V, R, M>(row, weights, x, begin, pieces, sums);
  }
  for (int i = 0; i < kTileRows * M; i++) results[i / M * all + i % M] += V::sum(V::load(sums + i * V::kWidth));
}

// Calls f.template operator()<M>(first) for runs of 1 <= M <= kMost tokens.
template <int kMost = kFewRows, class Fn>
void each_few(int tokens, const Fn& f) {
  const auto run = [&]<int M>(const auto& self, int t) {
    if constexpr (M > 1)
      if (tokens - t < M) return self.template operator()<M - 1>(self, t);
    f.template operator()<M>(t);
  };
  for (int t = 0; t < tokens; t += kMost) run.template operator()<kMost>(run, t);
}

// The same with W's codes and fixed-point rows of X, tile by tile.
template <class V, class Codec, class X>
void dot_codes_strip(const PackedMatrix& w, int strip, const X* const* x, int tokens, const DotAhead& further,
                     float* results) {
  constexpr int kTileBytes = info(Codec::kFormat).tile_bytes;
  const uint8_t* tile = w.tile(strip, 0);
  if constexpr (kKeepsSums<V, Codec> && X::kPlanes == 2)
    return each_few<X::kTerms == kExact ? kFewRows : kStripRows>(
        tokens, [&]<int M>(int t) {  // what comes next is prefetched once, with the first tokens
          dot_nibbles<V, Codec, M>(tile, w.col_tiles(), x + t, t ? DotAhead{} : further, tokens, results + t);
        });
  if constexpr (kKeepsSums<V, Codec> && X::kPlanes == 1)
    if (tokens == 1) return dot_byte_row<V, Codec>(tile, w.col_tiles(), x[0], further, results);
  alignas(64) float sums[kTileRows * kMostDots * 16];
  std::fill_n(sums, kTileRows * tokens * 16, 0.f);
  for (int i = 0; i < w.col_tiles(); i++, tile += kTileBytes)
    each_few(tokens, [&]<int M>(int t) {
      const X* at[M];
      for (int m = 0; m < M; m++) at[m] = x[t + m] + i;
      dot_tile<V, Codec, M>(tile, at, t && !kSpreads<M> ? nullptr : further.of(tile), tokens, sums + t * 16);
    });
  for (int i = 0; i < kTileRows * tokens; i += 4) {
    typename V::F of[4];
    for (int k = 0; k < 4; k++) {
      of[k] = V::load(sums + (i + k) * 16);
      for (int lane = V::kWidth; lane < 16; lane += V::kWidth)
        of[k] = V::add(of[k], V::load(sums + (i + k) * 16 + lane));
    }
    V::add_sums(results + i, of[0], of[1], of[2], of[3]);
  }
}

// Stores one strip's results in the layout of the call. On tile ISAs the remaining tokens of the strip become zeros.
template <class V>
void store_dots(const float* results, const GemmArgs& a, int out, float* c) {
  float* const piece = c + result_piece(out / 32, 0, a.tokens);
  if constexpr (kHasTiles<V>) std::fill_n(piece + out % 32 * 16, kTileRows * 16, 0.f);
  for (int r = 0; r < kTileRows; r++)
    for (int t = 0; t < a.tokens; t++)
      piece[kHasTiles<V> ? (out % 32 + r) * 16 + t : t * 32 + out % 32 + r] = results[r * a.tokens + t];
}

// The most tokens for which these products are faster than decoding to a panel; 0 stands for none. On tile ISAs they
// were measured for each format; AVX-512-BF16 without tiles has pairs of bf16 for formats without codes. Products of
// words are faster from five tokens on.
template <class V, class Codec>
constexpr int kMostDotTokens = [] {
  if (kHasTiles<V>) return info(Codec::kFormat).dot_tokens;
  if (kHasWords<V, Codec>) return kFewRows;
  if (kDotsCodes<V, Codec>) return kMostDots;
  return V::kPairs ? 0 : kFewRows;
}();

// X has kTerms where codes are multiplied.
template <class V, class Codec, int kTerms>
  requires(kMostDotTokens<V, Codec> > 0)
void few_tokens_forward(const GemmArgs& a) {
  using X = FixedPointOf<V, Codec, kTerms>;
  const int tokens = a.tokens;
  bf16* const panel = reinterpret_cast<bf16*>(a.scratch);
  bf16* const low_rank = panel + kDotPieces * kPieceElements;
  bf16* const x = low_rank + in_lines(size_t(tokens) * low_rank_cols(a) * sizeof(bf16)) / sizeof(bf16);
  X* const fixed = reinterpret_cast<X*>(x);
  const bf16 *rows_of_x[kMostDots], *rows_of_low_rank[kMostDots];
  const X* fixed_rows[kMostDots];
  const bool pairs = kDotsPairs<V, Codec> && tokens > kFewRows, fixes = kDotsCodes<V, Codec> && !pairs;
  for (int i = 0; i < a.count; i++) {
    const GemmTerm& term = a.terms[i];
    const PackedMatrix& w = *term.w;
    const bf16* const rows = kHasTiles<V> ? term.x + strip_elements(w.cols) : term.x;
    const bool anew = i == 0 || term.x != a.terms[i - 1].x;
    for (int t = 0; t < tokens; t++) {
      if constexpr (kDotsCodes<V, Codec>) {
        fixed_rows[t] = fixed + t * w.col_tiles();
        if (anew && fixes) fix_row<V>(rows + t * 32, w.cols, kPieceElements, fixed + t * w.col_tiles());
      }
      bf16* const row = x + t * (w.cols + kRowApart);
      rows_of_x[t] = row;
      if (anew && !fixes) copy_row(rows + t * 32, w.cols, row);
    }
    for (int t = 0; t < tokens && term.lora; t++) {
      bf16* const to = low_rank + t * term.lora->cols;
      rows_of_low_rank[t] = to;
      if constexpr (kHasTiles<V>)
        copy_turned_row(term.low_rank, t, term.lora->cols, to);
      else
        copy_row(term.low_rank + t * 32, term.lora->cols, to);
    }
    const GemmTerm* const next = i + 1 < a.count ? &a.terms[i + 1] : nullptr;
    const DotAhead further{w.tile((term.out_begin + a.out_count) / kTileRows, 0),
                           next ? next->w->tile(next->out_begin / kTileRows, 0) : a.next,
                           pairs ? kPairAhead<Codec> : kDotAhead};
    for (int out = 0; out < a.out_count; out += kTileRows) {
      float results[kTileRows * kMostDots] = {};
      const int strip = (term.out_begin + out) / kTileRows, lora_strip = (term.lora_begin + out) / kTileRows;
      each_few(tokens, [&]<int M>(int t) {
        if (term.lora)
          dot_strip<V, Bf16Codec, M>(*term.lora, lora_strip, rows_of_low_rank + t, panel, DotAhead{}, tokens,
                                     results + t);
        if constexpr (!kDotsCodes<V, Codec>)
          dot_strip<V, Codec, M>(w, strip, rows_of_x + t, panel, further, tokens, results + t);
      });
      if constexpr (kDotsPairs<V, Codec>)
        if (pairs)
          dot_pairs_strip<V, Codec>(
              w.tile(strip, 0), w.cols, rows_of_x, tokens, [&](const uint8_t* tile) { return further.of(tile); },
              results);
      if constexpr (kDotsCodes<V, Codec>)
        if (fixes) dot_codes_strip<V, Codec>(w, strip, fixed_rows, tokens, further, results);
      store_dots<V>(results, a, out, term.c);
    }
  }
}

// The same where X is int8: with more tokens byte_gemm-inl.h is faster, where there is that, or few_tiles-inl.h (both
// were measured, the latter with two threads).
template <class V, class Codec>
constexpr int kMostByteTokens = [] {
  if (kKeepsSums<V, Codec> && kDotsBytes<V, Codec>) return kHasTiles<V> ? 6 : kStripRows;
  return kHasByteGemm<V, Codec> ? kFewRows : kMostDotTokens<V, Codec>;
}();

// The same for the GEMM. On tile ISAs it prepares rows anew for every call, and few_tiles-inl.h is faster for all but
// one to three rows of 4-bit formats.
template <class V, class Codec>
constexpr int kMostGemmDots = [] {
  if (!kHasTiles<V>) return kMostDotTokens<V, Codec>;
  return kDotsBytes<V, Codec> ? std::min(3, kMostDotTokens<V, Codec>) : 0;
}();

// Does the call if it has few tokens. Returns whether it did.
template <class V, class Codec>
bool few_tokens(const GemmArgs& a) {
  static_assert(info(Codec::kFormat).dot_tokens <= kFewRows);
  if constexpr (kMostGemmDots<V, Codec> > 0) {
    const bool bytes = kDotsBytes<V, Codec> && a.activation_bits == 8;
    const int most = !bytes         ? kMostGemmDots<V, Codec>
                     : kHasTiles<V> ? std::min(kFewRows, kMostByteTokens<V, Codec>)  // X has no rows of more
                                    : kMostByteTokens<V, Codec>;
    if (reads_rows(most, a.tokens, a.terms[0].w->cols, low_rank_cols(a))) {
      bytes ? few_tokens_forward<V, Codec, kTermsOfBytes<V, Codec>>(a) : few_tokens_forward<V, Codec, kExact>(a);
      return true;
    }
  }
  return false;
}

}  // namespace ktft
