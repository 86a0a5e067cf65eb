// The GEMM of ISAs without products of bf16: weights and activations are widened to fp32, which is exact, and every
// weight only once for all tokens of a call.
#pragma once

#include <algorithm>

#include "kernels/kernels.h"
#include "kernels/row_runs-inl.h"
#include "quant/codecs.h"

namespace ktft {

// Reduction elements at a time. Forward: 4 rows of W (8 KB) and 16 tokens (16 KB of bf16) stay in L1; backward: 32
// columns of W (16 KB) and 16 tokens (8 KB of fp32).
constexpr int kFloatForwardBlock = 512, kFloatBackwardBlock = 128;

// The bytes of W that a forward product decodes after those of one strip and reduction block, a quarter of which is
// prefetched with each four rows of W that are multiplied meanwhile.
template <class V, class Codec>
struct StripAhead {
  const uint8_t* begin = nullptr;
  int64_t bytes = 0;

  static StripAhead after(const PackedMatrix& w, int out_begin, int out_end, int out, int begin, int block) {
    constexpr FormatInfo format = info(Codec::kFormat);
    out += kTileRows;
    if (out == out_end) out = out_begin, begin += block;
    if (begin >= w.cols) return {};
    return {w.tile(out / kTileRows, begin / format.tile_cols),
            int64_t(ceil_div(std::min(block, w.cols - begin), format.tile_cols)) * format.tile_bytes};
  }
  void prefetch_quarter(int index) const {
    if (bytes) prefetch(begin + bytes * index / 4, size_t(bytes / 4));
  }
};

// Widens a piece into a forward panel, [kTileRows / 4][pieces][4][32]: four rows of W are contiguous. Each run of 2
// kWidth columns has its even columns first, because they are cheaper to tell apart in bf16 than the first half.
template <class V>
void widen_rows(const bf16* piece, int index, int pieces, float* panel) {
  for (int r = 0; r < kTileRows; r++) {
    float* const to = panel + ((r / 4 * pieces + index) * 4 + r % 4) * 32;
    for (int c = 0; c < 32; c += 2 * V::kWidth) {
      V::store(to + c, V::even(piece + r * 32 + c));
      V::store(to + c + V::kWidth, V::odd(piece + r * 32 + c));
    }
  }
}

// C[r, j] += sum_i X[r, i] W[j, i] for the four rows of W at `w`.
template <class V, int R>
void forward_floats(const bf16* x, const float* w, int pieces, float* c) {
  static_assert(V::kForwardCols == 4);
  typename V::F acc[R][4];
  for (auto& row : acc)
    for (auto& a : row) a = V::zero();
  for (int t = 0; t < pieces; t++, x += kPieceElements, w += 4 * 32)
    for (int s = 0; s < 32; s += 2 * V::kWidth) {
      typename V::F in[R];
      for (int r = 0; r < R; r++) in[r] = V::even(x + r * 32 + s);
      for (int j = 0; j < 4; j++) {
        const typename V::F row = in_register<V>(V::load(w + j * 32 + s));
        for (int r = 0; r < R; r++) acc[r][j] = V::fma(in[r], row, acc[r][j]);
      }
      for (int r = 0; r < R; r++) in[r] = V::odd(x + r * 32 + s);
      for (int j = 0; j < 4; j++) {
        const typename V::F row = in_register<V>(V::load(w + j * 32 + s + V::kWidth));
        for (int r = 0; r < R; r++) acc[r][j] = V::fma(in[r], row, acc[r][j]);
      }
    }
  for (int r = 0; r < R; r++) V::add_sums(c + r * 32, acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
}

// C += X W^T for one matrix.
template <class V, class Codec>
void forward_in_floats(const GemmArgs& a, const PackedMatrix& w, int out_begin, const bf16* x, float* c) {
  float* const panel = reinterpret_cast<float*>(a.scratch);
  bf16* const spare = reinterpret_cast<bf16*>(panel + kFloatForwardBlock * kTileRows);
  for (int begin = 0; begin < w.cols; begin += kFloatForwardBlock) {
    const int pieces = std::min(kFloatForwardBlock, w.cols - begin) / 32;
    for (int out = 0; out < a.out_count; out += kTileRows) {
      for (int t = 0; t < pieces; t++)
        widen_rows<V>(Codec::template decode<V>(w, (out_begin + out) / kTileRows, begin / 32 + t, spare), t, pieces,
                      panel);
      const auto ahead = StripAhead<V, Codec>::after(w, out_begin, out_begin + a.out_count, out_begin + out, begin,
                                                     kFloatForwardBlock);
      for (int t = 0; t < a.tokens; t += kTileRows) {
        const bf16* const rows = x + activation_elements(t, w.cols) + begin * kTileRows;
        float* const at = c + result_piece(out / 32, t / kTileRows, a.tokens) + out % 32;
        for (int j = 0; j < kTileRows; j += 4) {
          if (t == 0) ahead.prefetch_quarter(j / 4);
          each_run<V::kForwardRows>(std::min(kTileRows, a.tokens - t), [&]<int R>(int r) {
            forward_floats<V, R>(rows + r * 32, panel + j * pieces * 32, pieces, at + r * 32 + j);
          });
        }
      }
    }
  }
}

// C[r, 0..32) += sum_n X[r, n] W[n, 0..32) over `strips` strips of 16 rows of W. X has pieces of fp32.
template <class V, int R>
void backward_floats(const float* x, const float* w, int strips, float* c) {
  constexpr int kVectors = 32 / V::kWidth;
  typename V::F acc[R][kVectors];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kVectors; v++) acc[r][v] = V::load(c + r * 32 + v * V::kWidth);
  for (int t = 0; t < strips; t++) {
    const float* const in = x + t / 2 * kPieceElements + t % 2 * kTileRows;
    for (int n = 0; n < kTileRows; n++, w += 32) {
      typename V::F values[R];
      for (int r = 0; r < R; r++) values[r] = V::set1(in[r * 32 + n]);
      for (int v = 0; v < kVectors; v++) {
        const typename V::F row = in_register<V>(V::load(w + v * V::kWidth));
        for (int r = 0; r < R; r++) acc[r][v] = V::fma(values[r], row, acc[r][v]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kVectors; v++) V::store(c + r * 32 + v * V::kWidth, acc[r][v]);
}

// C += X W for one matrix. A panel has up to two pieces' columns, [2][rows of W][32].
template <class V, class Codec>
void backward_in_floats(const GemmArgs& a, const PackedMatrix& w, int out_begin, const bf16* x, float* c) {
  float* const panel = reinterpret_cast<float*>(a.scratch);
  float* const wide = panel + 2 * kFloatBackwardBlock * 32;
  bf16* const spare = reinterpret_cast<bf16*>(wide + kFloatBackwardBlock * kTileRows);
  for (int begin = 0; begin < w.rows; begin += kFloatBackwardBlock) {
    const int rows = std::min(kFloatBackwardBlock, w.rows - begin);
    for (int col = 0; col < a.out_count; col += 64) {
      const int pieces = std::min(64, a.out_count - col) / 32;
      for (int n = 0; n < rows; n += kTileRows)
        for (int p = 0; p < pieces; p++) {
          const int strip = (begin + n) / kTileRows, piece = (out_begin + col) / 32 + p;
          const bf16* const from = Codec::template decode<V>(w, strip, piece, spare);
          float* const to = panel + (p * kFloatBackwardBlock + n) * 32;
          for (int i = 0; i < kPieceElements; i += V::kWidth) V::store(to + i, V::load(from + i));
        }
      for (int t = 0; t < a.tokens; t += kTileRows) {
        const bf16* const from = x + activation_elements(t, w.rows) + begin * kTileRows;
        for (int i = 0; i < pad_rows(rows) * kTileRows; i += V::kWidth) V::store(wide + i, V::load(from + i));
        for (int p = 0; p < pieces; p++) {
          float* const at = c + result_piece(col / 32 + p, t / kTileRows, a.tokens);
          each_run<V::kBackwardRows>(std::min(kTileRows, a.tokens - t), [&]<int R>(int r) {
            backward_floats<V, R>(wide + r * 32, panel + p * kFloatBackwardBlock * 32, rows / kTileRows, at + r * 32);
          });
        }
      }
    }
  }
}

}  // namespace ktft
