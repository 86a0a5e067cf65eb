// The GEMM on tile registers, 32 x 32 outputs at a time.
//
// Forward computes Y^T = W X^T: tiles of W are operand A as they lie (or, for other formats, decoded to bf16 once per
// reduction block), X was packed once a call into B operands: strips of 16 tokens, each a row of 1 KB tiles that hold
// the transpose of the tokens' column pairs. C comes out transposed and is turned at the end.
// Backward computes dX = dY W: rows of dY are operand A as they lie, tiles of W are decoded into interleaved row pairs.
// Tokens are taken without tails: callers leave kTokenPad readable rows behind X, and y holds whole 32s.
#pragma once

#include <algorithm>

#include "kernels/kernels.h"
#include "quant/codecs.h"

namespace ktft {

constexpr int kTileReduction = 512;  // 32 x 512 weights x 2 bytes = 32 KB stay in L1 while all tokens pass over them

struct TileOperand {  // two tiles side by side in M or N
  const bf16 *first, *second;
  int64_t row_bytes;  // from row to row of a tile
  int64_t step;       // elements to the tiles of the next 32 reduction elements
  bool half;          // the second tile does not count
};

struct TileOutput {  // tiles (0, 0), (0, 1), (1, 0), (1, 1) of C
  float* at[4];
  int64_t row_bytes;
};

// C += or = A . B over 32 * steps reduction elements.
template <class Tiles>
void tile_block(TileOperand a, TileOperand b, int steps, bool first, const TileOutput& c) {
  const bool used[4] = {true, !b.half, !a.half, !a.half && !b.half};
  if (first) {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
  } else {
    Tiles::template load<0>(c.at[0], c.row_bytes);
    if (used[1]) Tiles::template load<1>(c.at[1], c.row_bytes);
    if (used[2]) Tiles::template load<2>(c.at[2], c.row_bytes);
    if (used[3]) Tiles::template load<3>(c.at[3], c.row_bytes);
  }
  for (int s = 0; s < steps; s++) {
    Tiles::template load<4>(a.first + s * a.step, a.row_bytes);
    Tiles::template load<6>(b.first + s * b.step, b.row_bytes);
    Tiles::template dot<0, 4, 6>();
    if (used[1]) {
      Tiles::template load<7>(b.second + s * b.step, b.row_bytes);
      Tiles::template dot<1, 4, 7>();
    }
    if (used[2]) {
      Tiles::template load<5>(a.second + s * a.step, a.row_bytes);
      Tiles::template dot<2, 5, 6>();
    }
    if (used[3]) Tiles::template dot<3, 5, 7>();
  }
  Tiles::template store<0>(c.at[0], c.row_bytes);
  if (used[1]) Tiles::template store<1>(c.at[1], c.row_bytes);
  if (used[2]) Tiles::template store<2>(c.at[2], c.row_bytes);
  if (used[3]) Tiles::template store<3>(c.at[3], c.row_bytes);
}

// Row-major rows -> packed strips; see GemmArgs::x.
template <class V>
void pack_tokens(int tokens, int cols, const bf16* x, int64_t ldx, bf16* out) {
  for (int t = 0; t < tokens; t += 16)
    for (int c = 0; c < cols; c += 32, out += kPieceElements) V::transpose_dwords(x + t * ldx + c, ldx * 2, out, 64);
}

// C^T blocks of 32 x 32 in `sums`, [outputs / 32][tokens / 32] -> y, times the row scales.
template <class V>
void turn_outputs(const GemmArgs& a, const float* sums) {
  constexpr int64_t kRow = kMaxOutputs;
  for (int out = 0; out < a.out_count; out += 32)
    for (int t = 0; t < a.tokens; t += 16) {
      const float* const tiles = sums + (out / 32 * (kMaxTokens / 32) + t / 32) * 1024 + t / 16 % 2 * 256;
      float* const y = a.y + t * kRow + out;
      V::transpose_dwords(tiles, 64, y, kRow * 4);
      V::transpose_dwords(tiles + 512, 64, y + 16, kRow * 4);
      if (!a.w->row_scale) continue;
      const float* const scale = a.w->row_scale + a.out_begin + out;
      for (int r = 0; r < 16; r++)
        for (int j = 0; j < 32; j += V::kWidth)
          V::store(y + r * kRow + j, V::mul(V::load(y + r * kRow + j), V::load(scale + j)));
    }
}

// Pieces [first, first + pieces) of one strip: where they lie, when the codec has no work, or decoded into `panel`.
template <class V, class Codec>
const bf16* decode_strip(const PackedMatrix& w, int strip, int first, int pieces, bf16* panel) {
  const bf16* const at = Codec::template decode<V>(w, strip, first, panel);
  if (at == panel)
    for (int t = 1; t < pieces; t++) Codec::template decode<V>(w, strip, first + t, panel + t * kPieceElements);
  return at;
}

template <class V, class Codec>
void tile_gemm_forward(const GemmArgs& a) {
  using Tiles = typename V::Tiles;
  const PackedMatrix& w = *a.w;
  bf16 *const panel = reinterpret_cast<bf16*>(a.scratch), *const below = panel + kTileReduction * kTileRows;
  float* const sums = reinterpret_cast<float*>(panel + kTileReduction * 32);
  const int64_t strip = int64_t(w.cols) * 16;  // elements of one packed strip of tokens
  Tiles::configure();
  for (int begin = 0; begin < w.cols; begin += kTileReduction) {
    const int steps = std::min(kTileReduction, w.cols - begin) / 32;
    for (int out = 0; out < a.out_count; out += 32) {
      const int row = (a.out_begin + out) / kTileRows;
      const TileOperand rows{decode_strip<V, Codec>(w, row, begin / 32, steps, panel),
                             decode_strip<V, Codec>(w, row + 1, begin / 32, steps, below), 64, kPieceElements, false};
      for (int t = 0; t < a.tokens; t += 32) {
        const bf16* const x = a.x + t / 16 * strip + begin * 16;
        float* const c = sums + (out / 32 * (kMaxTokens / 32) + t / 32) * 1024;
        tile_block<Tiles>(rows, {x, x + strip, 64, kPieceElements, a.tokens - t <= 16}, steps, begin == 0,
                          {{c, c + 256, c + 512, c + 768}, 64});
      }
    }
  }
  Tiles::release();
  turn_outputs<V>(a, sums);
}

template <class V, class Codec>
void tile_gemm_backward(const GemmArgs& a) {
  using Tiles = typename V::Tiles;
  const PackedMatrix& w = *a.w;
  bf16* const panel = reinterpret_cast<bf16*>(a.scratch);  // row pairs of 128 bytes: columns 0-15, then 16-31
  bf16* const spare = panel + kTileReduction * 32;
  constexpr int64_t kRow = kMaxOutputs;
  Tiles::configure();
  for (int begin = 0; begin < w.rows; begin += kTileReduction) {
    const int strips = std::min(kTileReduction, w.rows - begin) / kTileRows;
    for (int out = 0; out < a.out_count; out += 32) {
      for (int s = 0; s < strips; s++)
        V::interleave_tile(Codec::template decode<V>(w, begin / kTileRows + s, (a.out_begin + out) / 32, spare),
                           panel + s * kPieceElements);
      for (int t = 0; t < a.tokens; t += 32) {
        const bf16* const x = a.x + t * a.ldx + begin;
        float* const y = a.y + t * kRow + out;
        tile_block<Tiles>({x, x + 16 * a.ldx, a.ldx * 2, 32, a.tokens - t <= 16},
                          {panel, panel + 32, 128, 2 * kPieceElements, false}, strips / 2, begin == 0 && !a.accumulate,
                          {{y, y + 16, y + 16 * kRow, y + 16 * kRow + 16}, kRow * 4});
      }
    }
  }
  Tiles::release();
}

}  // namespace ktft
