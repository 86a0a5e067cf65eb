// The GEMM on tile registers: X [tokens, reduction] is operand A as it lies in memory, the weights are decoded into B
// tiles, one reduction block at a time, and stay in L1 while all tokens pass over them.
//
// Forward decodes W's 16 x 32 pieces to the transpose of their column pairs, backward to interleaved row pairs. Tokens
// are taken 32 at a time without tails: callers leave kTokenPad readable rows behind X, and y holds whole 32s.
#pragma once

#include <algorithm>

#include "kernels/kernels.h"
#include "quant/codecs.h"

namespace ktft {

constexpr int kTileReduction = 512;  // 32 outputs x 512 x 2 bytes = 32 KB
constexpr int kTilePanel = 512;      // elements of one B tile

// C (32 x 32) of 2 x 2 tiles at y (row stride `block` floats) += or = X . panel. Panel: per 32 reduction elements two B
// tiles, `b_rows` bytes from row to row, `b_next` elements from the first to the second, `b_step` to the next pair.
template <class Tiles>
void tile_block(const bf16* x, int64_t ldx, const bf16* panel, int64_t b_rows, int64_t b_next, int64_t b_step,
                int steps, bool first, bool half, float* y, int block) {
  const int64_t x_rows = ldx * 2, y_rows = int64_t(block) * 4;
  float* const below = y + 16 * block;
  if (first) {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
  } else {
    Tiles::template load<0>(y, y_rows);
    Tiles::template load<1>(y + 16, y_rows);
    if (!half) {
      Tiles::template load<2>(below, y_rows);
      Tiles::template load<3>(below + 16, y_rows);
    }
  }
  for (int s = 0; s < steps; s++, x += 32, panel += b_step) {
    Tiles::template load<4>(x, x_rows);
    Tiles::template load<6>(panel, b_rows);
    Tiles::template dot<0, 4, 6>();
    Tiles::template load<7>(panel + b_next, b_rows);
    Tiles::template dot<1, 4, 7>();
    if (half) continue;
    Tiles::template load<5>(x + 16 * ldx, x_rows);
    Tiles::template dot<2, 5, 6>();
    Tiles::template dot<3, 5, 7>();
  }
  Tiles::template store<0>(y, y_rows);
  Tiles::template store<1>(y + 16, y_rows);
  if (half) return;
  Tiles::template store<2>(below, y_rows);
  Tiles::template store<3>(below + 16, y_rows);
}

template <class Tiles>
void tile_tokens(const GemmArgs& a, int begin, const bf16* panel, int64_t b_rows, int64_t b_next, int64_t b_step,
                 int steps, int col, int block, bool first) {
  for (int t = 0; t < a.tokens; t += 32)
    tile_block<Tiles>(a.x + t * a.ldx + begin, a.ldx, panel, b_rows, b_next, b_step, steps, first, a.tokens - t <= 16,
                      a.y + int64_t(t) * block + col, block);
}

template <class V, class Codec>
void tile_gemm_forward(const GemmArgs& a) {
  using Tiles = typename V::Tiles;
  const PackedMatrix& w = *a.w;
  bf16* const panel = reinterpret_cast<bf16*>(a.scratch);
  bf16* const spare = panel + kTileReduction * 32 + kTilePanel;
  Tiles::configure();
  for (int begin = 0; begin < w.cols; begin += kTileReduction) {
    const int steps = std::min(kTileReduction, w.cols - begin) / 32;
    for (int strip = 0; strip < 2; strip++)
      for (int t = 0; t < steps; t++)
        V::transpose_tile(Codec::template decode<V>(w, a.out_begin / kTileRows + strip, begin / 32 + t, spare),
                          panel + (t * 2 + strip) * kTilePanel);
    tile_tokens<Tiles>(a, begin, panel, 64, kTilePanel, 2 * kTilePanel, steps, 0, kBlock[0],
                       begin == 0 && !a.accumulate);
  }
  Tiles::release();
  if (!w.row_scale) return;
  for (int t = 0; t < a.tokens; t++)
    for (int j = 0; j < a.out_count; j += V::kWidth) {
      float* const at = a.y + int64_t(t) * kBlock[0] + j;
      V::store(at, V::mul(V::load(at), V::load(w.row_scale + a.out_begin + j)));
    }
}

template <class V, class Codec>
void tile_gemm_backward(const GemmArgs& a) {
  using Tiles = typename V::Tiles;
  const PackedMatrix& w = *a.w;
  const int pieces = a.out_count / 32;
  bf16* const panel = reinterpret_cast<bf16*>(a.scratch);
  bf16* const spare = panel + kTileReduction * 64 + kTilePanel;
  Tiles::configure();
  for (int begin = 0; begin < w.rows; begin += kTileReduction) {
    const int strips = std::min(kTileReduction, w.rows - begin) / kTileRows;
    for (int s = 0; s < strips; s++)
      for (int t = 0; t < pieces; t++)
        V::interleave_tile(Codec::template decode<V>(w, begin / kTileRows + s, a.out_begin / 32 + t, spare),
                           panel + (int64_t(t) * strips + s) * kTilePanel);
    for (int t = 0; t < pieces; t++)  // a row pair is 128 bytes: columns 0-15, then 16-31
      tile_tokens<Tiles>(a, begin, panel + int64_t(t) * strips * kTilePanel, 128, 32, 2 * kTilePanel, strips / 2,
                         t * 32, kBlock[1], begin == 0 && !a.accumulate);
  }
  Tiles::release();
}

}  // namespace ktft
