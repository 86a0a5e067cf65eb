// W8A8 on tile registers: int8 weights times int8 activations, 32 outputs x 32 tokens at a time.
//
// Tiles of W are operand A as they are stored, X is operand B (Int8Rows). A tile is 1 KB as with bf16 but holds 64
// columns, so the loops of tile_gemm-inl.h work with another product; their bf16 pointers then mean units of 2 bytes.
// Sums are int32, stored in place of the fp32 results, which they become after the last reduction block.
#pragma once

#include "kernels/epilogue-inl.h"
#include "kernels/tile_gemm-inl.h"

namespace ktft {

template <class Tiles>
struct Int8Tiles : Tiles {
  template <int C, int A, int B>
  static void dot() {
    Tiles::template dot_int8<C, A, B>();
  }
};

// Converts one strip of sums to results, in place.
template <class V>
void finish_int8(float* c, const float* scales, const float* add) {
  for (int t = 0; t < kTileRows; t += V::kWidth) {
    const typename V::F scale = V::load(scales + t);
    for (int at = t; at < kResultPiece; at += kTileRows) {
      const typename V::F sum = V::load_int32(c + at);
      V::store(c + at, add ? V::fma(sum, scale, V::load(add + at)) : V::mul(sum, scale));
    }
  }
}

template <class V>
void int8_gemm(const Int8GemmArgs& args) {
  using Tiles = Int8Tiles<typename V::Tiles>;
  const GemmArgs& a = args.gemm;
  const int cols = a.terms[0].w->cols, outs = a.out_count / 32, panels = a.count * outs;
  const int reduction = kTileReduction / 32 * kInt8TileCols, passes = panels * ceil_div(cols, reduction);
  const bool tokens_stay = int64_t(a.tokens) * cols <= kTokensInL2;
  const auto words = [](const void* bytes) { return static_cast<const bf16*>(bytes); };
  const bf16* const x = words(args.x.codes);
  Tiles::configure();
  for (int i = 0; i < passes; i++) {
    const ForwardPass at = forward_pass(a, kInt8TileCols, tokens_stay, i);
    const ForwardPass next = i + 1 < passes ? forward_pass(a, kInt8TileCols, tokens_stay, i + 1) : ForwardPass{};
    const int tile = at.begin / kInt8TileCols, next_begin = at.begin + reduction;
    const bool last = next_begin >= cols, fetch_tokens = !last && (!tokens_stay || at.panel == 0);
    const int64_t results = result_piece(at.panel % outs, 0, a.tokens);
    PanelPass<Tiles, false> pass{a};
    pass.weights = {words(at.term->w->tile(at.row, tile)), words(at.term->w->tile(at.row + 1, tile))};
    pass.x = x + tile * kPieceElements;
    pass.strip = int8_strip_bytes(cols) / int64_t(sizeof(bf16));
    pass.steps = at.steps;
    pass.first = at.begin == 0;
    pass.c = at.term->c + results;
    if (next.begin > 0) pass.next_c = next.term->c + result_piece(next.panel % outs, 0, a.tokens);
    if (fetch_tokens) {
      pass.next_x = x + (tile + at.steps) * kPieceElements;
      pass.next_lines = ceil_div(std::min(reduction, cols - next_begin), kInt8TileCols) * kTileRows;
      pass.panel = tokens_stay ? 0 : at.panel;
      pass.panels = tokens_stay ? 1 : panels;
    }
    pass.run(
        [&](int block, int blocks) {
          if (!next.term) return Ahead{};
          const PackedMatrix& w = *next.term->w;
          return ahead_part(w.tile(next.row, next.begin / kInt8TileCols), w.strip_bytes, next.steps * kTileRows, block,
                            blocks, at.steps);
        },
        [&](int strip) {
          if (!last) return;
          const int64_t piece = results + strip * kResultPiece;
          const float* const add = args.add[at.panel / outs];
          finish_int8<V>(at.term->c + piece, args.x.scales + strip * kTileRows, add ? add + piece : nullptr);
        });
  }
  Tiles::release();
}

// A token whose values are all (almost) zero becomes zeros. A NaN makes its token's scale NaN, so that it is not lost.
template <class V>
void quantize_strip(const bf16* strip, int cols, int8_t* codes, float* scales) {
  alignas(64) float factors[kTileRows];
  V::largest_of_pairs(strip, cols / 2, scales);
  for (int t = 0; t < kTileRows; t++) {
    factors[t] = 127.f / (scales[t] > 1e-30f ? scales[t] : 1e-30f);
    scales[t] /= 127.f;
  }
  for (int c = 0; c < cols; c += 4, strip += 4 * kTileRows, codes += kLine)
    V::store_codes(codes, strip, strip + 2 * kTileRows, factors);
  if (cols % kInt8TileCols) std::memset(codes, 0, kCodeBytes / 2);
}

}  // namespace ktft
