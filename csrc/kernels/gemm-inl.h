// The GEMM over one block of outputs, for any ISA and codec.
//
// Weights are decoded to bf16 pieces one reduction block at a time (64 KB or 128 KB, in L2) and all tokens pass over
// them before the next block, so that a weight is read from memory and decoded once. Decoding leaves a per-row scale
// out: it is applied to the outputs in forward, and was applied to X in backward.
#pragma once

#include <algorithm>

#include "kernels/kernels.h"
#include "quant/codecs.h"

namespace ktft {

// Y[r, j] += sum_i X[r, i] W[j, i] for kForwardCols rows of W inside one strip of decoded pieces.
template <class V, int R>
void forward_micro(const bf16* x, int64_t ldx, const bf16* w, int pieces, float* y, const float* scale) {
  typename V::F acc[R][V::kForwardCols];
  for (auto& row : acc)
    for (auto& a : row) a = V::zero();
  for (int t = 0; t < pieces; t++)
    for (int s = 0; s < 32; s += V::kStep) {
      typename V::In in[V::kForwardCols];
      for (int j = 0; j < V::kForwardCols; j++) in[j] = V::load_in(w + t * kPieceElements + j * 32 + s);
      for (int r = 0; r < R; r++) {
        const typename V::In v = V::load_in(x + r * ldx + t * 32 + s);
        for (int j = 0; j < V::kForwardCols; j++) acc[r][j] = V::dot(acc[r][j], v, in[j]);
      }
    }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < V::kForwardCols; j++) y[r * kMaxOutputs + j] += V::sum(acc[r][j]) * (scale ? scale[j] : 1.f);
}

// Y[r, 0..32) += sum_n X[r, n] W[n, 0..32) over `strips` decoded pieces that lie `stride` elements apart.
template <class V, int R>
void backward_micro(const bf16* x, int64_t ldx, const bf16* w, int64_t stride, int strips, float* y) {
  constexpr int kVectors = 32 / V::kWidth;
  typename V::F acc[R][kVectors];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < kVectors; c++) acc[r][c] = V::load(y + r * kMaxOutputs + c * V::kWidth);
  for (int t = 0; t < strips; t++, w += stride, x += kTileRows) {
    if constexpr (V::kPairs) {
      for (int n = 0; n < kTileRows; n += 2) {
        const typename V::In w0 = V::load_in(w + n * 32), w1 = V::load_in(w + n * 32 + 32);
        for (int r = 0; r < R; r++) {
          const typename V::In v = V::broadcast_pair(x + r * ldx + n);
          acc[r][0] = V::dot(acc[r][0], v, w0);
          acc[r][1] = V::dot(acc[r][1], v, w1);
        }
      }
    } else {
      for (int n = 0; n < kTileRows; n++) {
        typename V::F row[kVectors];
        for (int c = 0; c < kVectors; c++) row[c] = V::load(w + n * 32 + c * V::kWidth);
        for (int r = 0; r < R; r++) {
          const typename V::F v = V::set1(to_float(x[r * ldx + n]));
          for (int c = 0; c < kVectors; c++) acc[r][c] = V::fma(v, row[c], acc[r][c]);
        }
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < kVectors; c++) V::store(y + r * kMaxOutputs + c * V::kWidth, acc[r][c]);
}

// Calls f.template operator()<R>() with R = rows, 1 <= rows <= Max: a tail needs no masked code.
template <int Max, class Fn>
void with_rows(int rows, const Fn& f) {
  if constexpr (Max > 1) {
    if (rows < Max) return with_rows<Max - 1>(rows, f);
  }
  f.template operator()<Max>();
}

static inline void clear(const GemmArgs& a) {
  if (a.accumulate) return;
  for (int t = 0; t < a.tokens; t++) std::memset(a.y + int64_t(t) * kMaxOutputs, 0, size_t(a.out_count) * 4);
}

template <class V, class Codec>
void gemm_forward(const GemmArgs& a) {
  const PackedMatrix& w = *a.w;
  bf16* const panel = reinterpret_cast<bf16*>(a.scratch);
  clear(a);
  for (int begin = 0; begin < w.cols; begin += kReductionBlock) {
    const int pieces = std::min(kReductionBlock, w.cols - begin) / 32;
    for (int strip = 0; strip < a.out_count / kTileRows; strip++) {
      const int row = a.out_begin + strip * kTileRows;
      // Without a codec's work, weights are read where they lie: the first piece, and the others after it
      const bf16* const weights = Codec::template decode<V>(w, row / kTileRows, begin / 32, panel);
      if (weights == panel)
        for (int t = 1; t < pieces; t++)
          Codec::template decode<V>(w, row / kTileRows, begin / 32 + t, panel + t * kPieceElements);
      for (int t = 0; t < a.tokens; t += V::kForwardRows)
        for (int j = 0; j < kTileRows; j += V::kForwardCols)
          with_rows<V::kForwardRows>(std::min(V::kForwardRows, a.tokens - t), [&]<int R>() {
            forward_micro<V, R>(a.x + t * a.ldx + begin, a.ldx, weights + j * 32, pieces,
                                a.y + int64_t(t) * kMaxOutputs + strip * kTileRows + j,
                                w.row_scale ? w.row_scale + row + j : nullptr);
          });
    }
  }
}

// Decoded pieces of `strips` row strips x 64 columns; each strip's one or two pieces follow each other.
template <class V, class Codec>
void decode_columns(const PackedMatrix& w, int first_strip, int strips, int first_piece, int pieces, bf16* panel,
                    bf16* spare) {
  for (int s = 0; s < strips; s++)
    for (int t = 0; t < pieces; t++) {
      bf16* const out = panel + (s * 2 + t) * kPieceElements;
      if constexpr (V::kPairs) {
        V::interleave_tile(Codec::template decode<V>(w, first_strip + s, first_piece + t, spare), out);
      } else {
        const bf16* piece = Codec::template decode<V>(w, first_strip + s, first_piece + t, out);
        if (piece != out) std::memcpy(out, piece, kPieceElements * sizeof(bf16));
      }
    }
}

template <class V, class Codec>
void gemm_backward(const GemmArgs& a) {
  const PackedMatrix& w = *a.w;
  bf16* const panel = reinterpret_cast<bf16*>(a.scratch);
  bf16* const spare = panel + kReductionBlock * 64;
  clear(a);
  for (int begin = 0; begin < w.rows; begin += kReductionBlock) {
    const int rows = std::min(kReductionBlock, w.rows - begin), strips = rows / kTileRows;
    for (int col = 0; col < a.out_count; col += 64) {
      const int pieces = std::min(64, a.out_count - col) / 32;
      decode_columns<V, Codec>(w, begin / kTileRows, strips, (a.out_begin + col) / 32, pieces, panel, spare);
      for (int t = 0; t < a.tokens; t += V::kBackwardRows)
        for (int c = 0; c < pieces; c++)
          with_rows<V::kBackwardRows>(std::min(V::kBackwardRows, a.tokens - t), [&]<int R>() {
            backward_micro<V, R>(a.x + t * a.ldx + begin, a.ldx, panel + c * kPieceElements, 2 * kPieceElements, strips,
                                 a.y + int64_t(t) * kMaxOutputs + col + c * 32);
          });
    }
  }
}

}  // namespace ktft
