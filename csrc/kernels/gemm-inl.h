// The GEMM on vector registers. Weights are decoded one reduction block at a time, which all tokens use before the next
// one is decoded: each weight is read from memory and decoded once. Here are products of pairs of bf16, whose blocks of
// bf16 pieces (32 KB or 128 KB) stay in L2; ISAs without them have float_gemm-inl.h and word_gemm-inl.h.
#pragma once

#include <algorithm>

#include "kernels/byte_gemm-inl.h"
#include "kernels/few_tokens-inl.h"
#include "kernels/float_gemm-inl.h"
#include "kernels/kernels.h"
#include "kernels/row_runs-inl.h"
#include "kernels/word_gemm-inl.h"
#include "quant/codecs.h"

namespace ktft {

// C[r, j] += sum_i X[r, i] W[j, i] for kForwardCols rows of W inside one strip of decoded pieces.
template <class V, int R>
void forward_micro(const bf16* x, const bf16* w, int pieces, float* c) {
  typename V::F acc[R][V::kForwardCols];
  for (auto& row : acc)
    for (auto& a : row) a = V::zero();
  for (int t = 0; t < pieces; t++)
    for (int s = 0; s < 32; s += V::kStep) {
      typename V::In in[V::kForwardCols];
      for (int j = 0; j < V::kForwardCols; j++) in[j] = V::load_in(w + t * kPieceElements + j * 32 + s);
      for (int r = 0; r < R; r++) {
        const typename V::In v = V::load_in(x + t * kPieceElements + r * 32 + s);
        for (int j = 0; j < V::kForwardCols; j++) acc[r][j] = V::dot(acc[r][j], v, in[j]);
      }
    }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < V::kForwardCols; j++) c[r * 32 + j] += V::sum(acc[r][j]);
}

// C[r, 0..32) += sum_n X[r, n] W[n, 0..32) over `strips` decoded pieces that lie `stride` elements apart.
template <class V, int R>
void backward_micro(const bf16* x, const bf16* w, int64_t stride, int strips, float* c) {
  constexpr int kVectors = 32 / V::kWidth;
  typename V::F acc[R][kVectors];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kVectors; v++) acc[r][v] = V::load(c + r * 32 + v * V::kWidth);
  for (int t = 0; t < strips; t++, w += stride) {
    const bf16* const in = x + t / 2 * kPieceElements + t % 2 * kTileRows;
    for (int n = 0; n < kTileRows; n += 2) {
      const typename V::In w0 = V::load_in(w + n * 32), w1 = V::load_in(w + n * 32 + 32);
      for (int r = 0; r < R; r++) {
        const typename V::In v = V::broadcast_pair(in + r * 32 + n);
        acc[r][0] = V::dot(acc[r][0], v, w0);
        acc[r][1] = V::dot(acc[r][1], v, w1);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kVectors; v++) V::store(c + r * 32 + v * V::kWidth, acc[r][v]);
}

static inline void clear(const GemmArgs& a, float* c) {
  std::memset(c, 0, size_t(result_piece(a.out_count / 32, 0, a.tokens)) * sizeof(float));
}

// C += X W^T for one matrix.
template <class V, class Codec>
void forward_product(const GemmArgs& a, const PackedMatrix& w, int out_begin, const bf16* x, float* c) {
  bf16* const panel = reinterpret_cast<bf16*>(a.scratch);
  for (int begin = 0; begin < w.cols; begin += kReductionBlock) {
    const int pieces = std::min(kReductionBlock, w.cols - begin) / 32;
    for (int out = 0; out < a.out_count; out += kTileRows) {
      // Weights that need no decoding are read in place: the first piece, and the others after it
      const int strip = (out_begin + out) / kTileRows;
      const bf16* const weights = Codec::template decode<V>(w, strip, begin / 32, panel);
      if (weights == panel)
        for (int t = 1; t < pieces; t++)
          Codec::template decode<V>(w, strip, begin / 32 + t, panel + t * kPieceElements);
      for (int t = 0; t < a.tokens; t += kTileRows) {
        const bf16* const rows = x + activation_elements(t, w.cols) + begin * kTileRows;
        float* const at = c + result_piece(out / 32, t / kTileRows, a.tokens) + out % 32;
        for (int j = 0; j < kTileRows; j += V::kForwardCols)
          each_run<V::kForwardRows>(std::min(kTileRows, a.tokens - t), [&]<int R>(int r) {
            forward_micro<V, R>(rows + r * 32, weights + j * 32, pieces, at + r * 32 + j);
          });
      }
    }
  }
}

// The same with column pairs of W, transposed so that lanes are outputs: worth it where sums over lanes cost more.
constexpr int kTurnTokens = 8;
template <class V, class Codec>
void forward_pairs(const GemmArgs& a, const PackedMatrix& w, int out_begin, const bf16* x, float* c) {
  bf16 *const panel = reinterpret_cast<bf16*>(a.scratch), *const spare = panel + kReductionBlock * 64;
  for (int begin = 0; begin < w.cols; begin += kReductionBlock) {
    const int pieces = std::min(kReductionBlock, w.cols - begin) / 32;
    for (int out = 0; out < a.out_count; out += 32) {
      for (int t = 0; t < pieces; t++)
        for (int s = 0; s < 2; s++)
          V::transpose_dwords(Codec::template decode<V>(w, (out_begin + out) / kTileRows + s, begin / 32 + t, spare),
                              64, panel + t * 2 * kPieceElements + s * 32, 128);
      for (int t = 0; t < a.tokens; t += kTileRows) {
        const bf16* const rows = x + activation_elements(t, w.cols) + begin * kTileRows;
        float* const at = c + result_piece(out / 32, t / kTileRows, a.tokens);
        each_run<V::kBackwardRows>(std::min(kTileRows, a.tokens - t), [&]<int R>(int r) {
          backward_micro<V, R>(rows + r * 32, panel, kPieceElements, 2 * pieces, at + r * 32);
        });
      }
    }
  }
}

template <class V, class Codec>
void forward_term(const GemmArgs& a, const PackedMatrix& w, int out_begin, const bf16* x, float* c) {
  if constexpr (!V::kPairs)
    forward_in_floats<V, Codec>(a, w, out_begin, x, c);
  else if (a.tokens >= kTurnTokens)
    forward_pairs<V, Codec>(a, w, out_begin, x, c);
  else
    forward_product<V, Codec>(a, w, out_begin, x, c);
}

template <class V, class Codec>
void gemm_forward(const GemmArgs& a) {
  if (few_tokens<V, Codec>(a)) return;
  const bool bytes = kHasByteGemm<V, Codec> && a.activation_bits == 8;
  for (int i = 0; i < a.count; i++) {
    const GemmTerm& term = a.terms[i];
    clear(a, term.c);
    if (term.lora) forward_term<V, Bf16Codec>(a, *term.lora, term.lora_begin, term.low_rank, term.c);
    if (!bytes && !kHasWords<V, Codec>) forward_term<V, Codec>(a, *term.w, term.out_begin, term.x, term.c);
  }
  if constexpr (kHasByteGemm<V, Codec>)
    if (bytes) return forward_in_integers<V, Codec, ByteProducts<V>>(a);
  if constexpr (kHasWords<V, Codec>) forward_in_integers<V, Codec, WordProducts<V>>(a);
}

// Decodes the pieces of `strips` row strips x 64 columns. The one or two pieces of each strip are contiguous.
template <class V, class Codec>
void decode_columns(const PackedMatrix& w, int first_strip, int strips, int first_piece, int pieces, bf16* panel,
                    bf16* spare) {
  for (int s = 0; s < strips; s++)
    for (int t = 0; t < pieces; t++) {
      bf16* const out = panel + (s * 2 + t) * kPieceElements;
      V::interleave_tile(Codec::template decode<V>(w, first_strip + s, first_piece + t, spare), out);
    }
}

// C += X W for one matrix.
template <class V, class Codec>
void backward_product(const GemmArgs& a, const PackedMatrix& w, int out_begin, const bf16* x, float* c) {
  bf16* const panel = reinterpret_cast<bf16*>(a.scratch);
  bf16* const spare = panel + kReductionBlock * 64;
  for (int begin = 0; begin < w.rows; begin += kReductionBlock) {
    const int strips = std::min(kReductionBlock, w.rows - begin) / kTileRows;
    for (int col = 0; col < a.out_count; col += 64) {
      const int pieces = std::min(64, a.out_count - col) / 32;
      decode_columns<V, Codec>(w, begin / kTileRows, strips, (out_begin + col) / 32, pieces, panel, spare);
      for (int t = 0; t < a.tokens; t += kTileRows)
        for (int p = 0; p < pieces; p++) {
          const bf16* const rows = x + activation_elements(t, w.rows) + begin * kTileRows;
          float* const at = c + result_piece(col / 32 + p, t / kTileRows, a.tokens);
          each_run<V::kBackwardRows>(std::min(kTileRows, a.tokens - t), [&]<int R>(int r) {
            backward_micro<V, R>(rows + r * 32, panel + p * kPieceElements, 2 * kPieceElements, strips, at + r * 32);
          });
        }
    }
  }
}

template <class V, class Codec>
void backward_term(const GemmArgs& a, const PackedMatrix& w, int out_begin, const bf16* x, float* c) {
  if constexpr (V::kPairs)
    backward_product<V, Codec>(a, w, out_begin, x, c);
  else
    backward_in_floats<V, Codec>(a, w, out_begin, x, c);
}

template <class V, class Codec>
void gemm_backward(const GemmArgs& a) {
  float* const c = a.terms[0].c;
  clear(a, c);
  for (int i = 0; i < a.count; i++) {
    const GemmTerm& term = a.terms[i];
    if (term.lora) backward_term<V, Bf16Codec>(a, *term.lora, term.lora_begin, term.low_rank, c);
    backward_term<V, Codec>(a, *term.w, term.out_begin, term.x, c);
  }
}

}  // namespace ktft
