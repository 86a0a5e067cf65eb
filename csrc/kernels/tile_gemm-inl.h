// The GEMM on tile registers, 32 x 32 results at a time.
//
// Forward computes C^T = W X^T. Tiles of bf16 W are operand A as they are stored; other formats are decoded to bf16
// once per reduction block. X is operand B: strips of 16 tokens, each a sequence of 1 KB tiles with their column pairs
// transposed. Backward computes C = X W: rows of X are operand A, tiles of W are decoded into interleaved row pairs.
//
// A panel of W, 32 outputs x kTileReduction, stays in L1 while all tokens stream past it from L2, with a hint not to
// keep them in L1; the previous block's results come from L2 too. Meanwhile the next results, the next panel and the
// tokens of the next block are prefetched (docs/dev/kernel-log.md says what each of these gains).
#pragma once

#include <algorithm>

#include "kernels/few_tiles-inl.h"
#include "kernels/few_tokens-inl.h"
#include "kernels/kernels.h"
#include "quant/codecs.h"

namespace ktft {

constexpr int kTileReduction = 512;  // 32 x 512 weights x 2 bytes = 32 KB of the 48 KB of L1
constexpr int kLine = kCacheLine;

struct TileOperand {  // two tiles side by side in M or N
  const bf16 *first, *second;
};

struct TileOutput {  // tiles (0, 0), (0, 1), (1, 0), (1, 1) of C
  float* at[4];
  int row_bytes;
};

// Memory to prefetch: at each step some lines, and as many `apart` bytes further; after `span` steps, `jump` bytes are
// skipped. (Functions are static for the reason given in base/types.h.)
struct Ahead {
  const char* at;
  int64_t apart;
  int lines, span, left;
  int64_t jump;
};

struct AheadSet {
  Ahead weights, tokens;
  const char* results;  // 4 KB, or null
};

// Part `part` of `parts` of two runs of `total` lines, spread over the steps.
static inline Ahead ahead_part(const void* begin, int64_t apart, int total, int part, int parts, int steps) {
  const int lines = ceil_div(total, parts * steps), first = part * lines * steps;
  if (first >= total) return {};
  return {static_cast<const char*>(begin) + int64_t(first) * kLine, apart, lines, steps, steps, 0};
}

__attribute__((always_inline)) static inline void fetch(Ahead& ahead) {
  for (int i = 0; i < ahead.lines; i++, ahead.at += kLine) {
    prefetch(ahead.at);
    prefetch(ahead.at + ahead.apart);
  }
  if (--ahead.left == 0) {
    ahead.at += ahead.jump;
    ahead.left = ahead.span;
  }
}

// Tokens are operand A or B and are streamed: rows of 64 bytes, in contiguous pieces. W as operand A has the same
// layout; as operand B it consists of row pairs of 128 bytes.
template <class Tiles, int T, bool kTokens, bool kPairs>
void load_tile(const bf16* at, int step) {
  if constexpr (kTokens)
    Tiles::template stream<T>(at + step * kPieceElements, kLine);
  else if constexpr (kPairs)
    Tiles::template load<T>(at + step * 2 * kPieceElements, 2 * kLine);
  else
    Tiles::template load<T>(at + step * kPieceElements, kLine);
}

struct Nothing {
  void operator()(int) const {}
};

// Adds A . B over 32 * steps reduction elements to tiles 0 to 3. With kHalf, the tokens' second tile is left out.
// before(s) is called before step s.
template <class Tiles, bool kTokensAreA, bool kHalf, class Before = Nothing>
void tile_steps(const TileOperand a, const TileOperand b, const int steps, AheadSet ahead, const Before& before = {}) {
  constexpr bool kTokensAreB = !kTokensAreA;
  for (int s = 0; s < steps; s++) {
    before(s);
    load_tile<Tiles, 4, kTokensAreA, false>(a.first, s);
    load_tile<Tiles, 6, kTokensAreB, true>(b.first, s);
    Tiles::template dot<0, 4, 6>();
    fetch(ahead.weights);
    if constexpr (kTokensAreA || !kHalf) {
      load_tile<Tiles, 7, kTokensAreB, true>(b.second, s);
      Tiles::template dot<1, 4, 7>();
    }
    fetch(ahead.tokens);
    if constexpr (kTokensAreB || !kHalf) {
      load_tile<Tiles, 5, kTokensAreA, false>(a.second, s);
      Tiles::template dot<2, 5, 6>();
    }
    if (ahead.results)
      for (int i = 0; i < 4; i++, ahead.results += kLine) prefetch_l1(ahead.results);
    if constexpr (!kHalf) Tiles::template dot<3, 5, 7>();
  }
}

struct TileProduct {
  TileOperand a, b;
  int steps;
};

// C = lora + main if `first`, otherwise C += main.
template <class Tiles, bool kTokensAreA, bool kHalf, class Before = Nothing>
void tile_block(const TileProduct* lora, const TileProduct& main, bool first, const TileOutput& c,
                const AheadSet& ahead, const Before& before = {}) {
  constexpr bool kUse1 = kTokensAreA || !kHalf, kUse2 = !kTokensAreA || !kHalf;
  if (first) {
    Tiles::template zero<0>();
    if constexpr (kUse1) Tiles::template zero<1>();
    if constexpr (kUse2) Tiles::template zero<2>();
    if constexpr (!kHalf) Tiles::template zero<3>();
  } else {
    Tiles::template load<0>(c.at[0], c.row_bytes);
    if constexpr (kUse1) Tiles::template load<1>(c.at[1], c.row_bytes);
    if constexpr (kUse2) Tiles::template load<2>(c.at[2], c.row_bytes);
    if constexpr (!kHalf) Tiles::template load<3>(c.at[3], c.row_bytes);
  }
  if (lora) tile_steps<Tiles, kTokensAreA, kHalf>(lora->a, lora->b, lora->steps, {});
  tile_steps<Tiles, kTokensAreA, kHalf>(main.a, main.b, main.steps, ahead, before);
  Tiles::template store<0>(c.at[0], c.row_bytes);
  if constexpr (kUse1) Tiles::template store<1>(c.at[1], c.row_bytes);
  if constexpr (kUse2) Tiles::template store<2>(c.at[2], c.row_bytes);
  if constexpr (!kHalf) Tiles::template store<3>(c.at[3], c.row_bytes);
}

// Multiplies one panel of W by all tokens.
//   weights, lora   the panel as an operand; the matching rows or columns of lora, or null
//   x, low_rank     the tokens' first strips at these reduction elements; strips are `strip` apart
template <class Tiles, bool kTokensAreA>
struct PanelPass {
  const GemmArgs& args;
  TileOperand weights{}, lora_weights{};
  const bf16 *x = nullptr, *low_rank = nullptr;
  int64_t strip = 0, low_strip = 0;
  int steps = 0, lora_steps = 0;
  bool first = false;  // there is no earlier result to add to
  float* c = nullptr;
  const float* next_c = nullptr;  // results to which the next pass adds, or null
  const bf16* next_x = nullptr;   // the tokens of the next reduction block, or null
  int next_lines = 0;             // cache lines of one strip of next_x
  int panel = 0, panels = 1;      // which part of next_x is prefetched during this pass

  TileProduct product(const bf16* rows, int64_t apart, const TileOperand& other, int count) const {
    const TileOperand tokens{rows, rows + apart};
    return kTokensAreA ? TileProduct{tokens, other, count} : TileProduct{other, tokens, count};
  }

  // weights_ahead(block, blocks) returns the part of the next panel to prefetch. done(strip) is called with each
  // strip's results in L1, one block late, so that it does not wait for the products. before(step) is called in the
  // first block of tokens.
  template <class Fn, class Done = Nothing, class Before = Nothing>
  void run(const Fn& weights_ahead, const Done& done = {}, const Before& before = {}) const {
    const int blocks = ceil_div(args.tokens, kRowPad), strips = ceil_div(args.tokens, kTileRows);
    for (int block = 0; block < blocks; block++) {
      const int64_t at = block * 2;
      float* const out = c + at * kResultPiece;
      AheadSet ahead{};
      ahead.weights = weights_ahead(block, blocks);
      if (next_x) ahead.tokens = ahead_part(next_x + at * strip, strip * 2, next_lines, panel, panels, steps);
      const bool last = block + 1 == blocks;
      if (last || !first) ahead.results = reinterpret_cast<const char*>(last ? next_c : out + 2 * kResultPiece);
      const TileProduct main = product(x + at * strip, strip, weights, steps);
      const TileProduct lora = product(low_rank + at * low_strip, low_strip, lora_weights, lora_steps);
      const TileOutput results = kTokensAreA ? TileOutput{{out, out + 16, out + 512, out + 528}, 2 * kLine}
                                             : TileOutput{{out, out + 512, out + 256, out + 768}, kLine};
      const TileProduct* const extra = lora_steps ? &lora : nullptr;
      const bool half = args.tokens - block * kRowPad <= kTileRows;
      if (block > 0)
        (half ? tile_block<Tiles, kTokensAreA, true> : tile_block<Tiles, kTokensAreA, false>)(extra, main, first,
                                                                                              results, ahead, {});
      else if (half)
        tile_block<Tiles, kTokensAreA, true>(extra, main, first, results, ahead, before);
      else
        tile_block<Tiles, kTokensAreA, false>(extra, main, first, results, ahead, before);
      for (int s = std::max(0, block * 2 - 2); s < block * 2; s++) done(s);
    }
    for (int s = blocks * 2 - 2; s < strips; s++) done(s);
  }
};

// With so few tokens that decoding takes longer than multiplying, the next panel's first strip is prefetched while this
// one is decoded, its second strip while this one is multiplied.
constexpr int kFewTokens = 128;
// Tokens of up to so many bytes stay in L2 while all of W streams past.
constexpr int64_t kTokensInL2 = 1 << 20;

// Returns pieces [first, first + pieces) of one strip: in place if they need no decoding, else decoded into `panel`.
// While decoding, prefetches one half (0 or 1) of each of as many tiles at `next`, unless `next` is null.
template <class V, class Codec>
const bf16* decode_strip(const PackedMatrix& w, int strip, int first, int pieces, bf16* panel, const uint8_t* next,
                         int half) {
  constexpr FormatInfo format = info(Codec::kFormat);
  constexpr int kPieces = format.tile_cols / 32, kHalf = format.tile_bytes / kLine / 2 * kLine;
  const bf16* const at = Codec::template decode<V>(w, strip, first, panel);
  if (at != panel) return at;
  for (int t = 1; t <= pieces; t++) {
    if (next && (t % kPieces == 0 || t == pieces)) {
      const uint8_t* const tile = next + (t - 1) / kPieces * format.tile_bytes;
      prefetch(half ? tile + kHalf : tile, half ? format.tile_bytes - kHalf : kHalf);
    }
    if (t < pieces) Codec::template decode<V>(w, strip, first + t, panel + t * kPieceElements);
  }
  return at;
}

// Decodes strips [first, first + strips) x one piece of columns into row pairs of 128 bytes: columns 0-15, then 16-31.
template <class V, class Codec>
void decode_pairs(const PackedMatrix& w, int first, int strips, int piece, bf16* panel) {
  alignas(64) bf16 spare[kPieceElements];
  for (int s = 0; s < strips; s++)
    V::interleave_tile(Codec::template decode<V>(w, first + s, piece, spare), panel + s * kPieceElements);
}

// The panel and the reduction block of one pass.
struct ForwardPass {
  const GemmTerm* term;
  int panel;  // counted over all terms
  int row;    // strip of W
  int lora_row;
  int begin, steps;
};

// Pass number `index` of a call, whose products advance by `step` columns.
static inline ForwardPass forward_pass(const GemmArgs& a, int step, bool tokens_stay, int index) {
  const int cols = a.terms[0].w->cols, outs = a.out_count / 32, panels = a.count * outs;
  const int reduction = kTileReduction / 32 * step, blocks = ceil_div(cols, reduction);
  const int panel = tokens_stay ? index / blocks : index % panels, out = panel % outs * 32;
  const int begin = (tokens_stay ? index % blocks : index / panels) * reduction;
  const GemmTerm* const term = &a.terms[panel / outs];
  return {term,
          panel,
          (term->out_begin + out) / kTileRows,
          (term->lora_begin + out) / kTileRows,
          begin,
          ceil_div(std::min(reduction, cols - begin), step)};
}

template <class V, class Codec>
void tile_gemm_forward(const GemmArgs& a) {
  if (few_tokens<V, Codec>(a)) return;
  if (a.tokens <= kFewTileTokens) return few_tiles_forward<V, Codec>(a);
  using Tiles = typename V::Tiles;
  constexpr FormatInfo format = info(Codec::kFormat);
  constexpr bool kDecodes = Codec::kFormat != Format::kBf16;
  bf16 *const panel = reinterpret_cast<bf16*>(a.scratch), *const below = panel + kTileReduction * kTileRows;
  const int cols = a.terms[0].w->cols, outs = a.out_count / 32, panels = a.count * outs;
  const int passes = panels * ceil_div(cols, kTileReduction);
  const bool tokens_stay = int64_t(a.tokens) * cols * int(sizeof(bf16)) <= kTokensInL2;
  Tiles::configure();
  for (int i = 0; i < passes; i++) {
    const ForwardPass at = forward_pass(a, 32, tokens_stay, i);
    const ForwardPass next = i + 1 < passes ? forward_pass(a, 32, tokens_stay, i + 1) : ForwardPass{};
    const uint8_t* raw[2] = {};
    for (int s = 0; s < 2 && next.term; s++) raw[s] = next.term->w->tile(next.row + s, next.begin / format.tile_cols);
    const bool while_decoding = kDecodes && a.tokens <= kFewTokens;
    const GemmTerm& term = *at.term;
    // If they stay in L2, the next block's tokens are prefetched with the first panel, otherwise a part with each panel
    const int next_begin = at.begin + kTileReduction;
    const bool fetch_tokens = next_begin < cols && (!tokens_stay || at.panel == 0);
    PanelPass<Tiles, false> pass{a};
    pass.weights = {
        decode_strip<V, Codec>(*term.w, at.row, at.begin / 32, at.steps, panel, while_decoding ? raw[0] : nullptr, 0),
        decode_strip<V, Codec>(*term.w, at.row + 1, at.begin / 32, at.steps, below, while_decoding ? raw[0] : nullptr,
                               1)};
    pass.x = term.x + at.begin * kTileRows;
    pass.low_rank = term.low_rank;
    pass.strip = strip_elements(cols);
    pass.steps = at.steps;
    pass.first = at.begin == 0;
    pass.c = term.c + result_piece(at.panel % outs, 0, a.tokens);
    if (next.begin > 0) pass.next_c = next.term->c + result_piece(next.panel % outs, 0, a.tokens);
    if (fetch_tokens) {
      pass.next_x = term.x + next_begin * kTileRows;
      pass.next_lines = std::min(kTileReduction, cols - next_begin) / 2;
      pass.panel = tokens_stay ? 0 : at.panel;
      pass.panels = tokens_stay ? 1 : panels;
    }
    if (term.lora && pass.first) {
      const PackedMatrix& m = *term.lora;
      pass.lora_weights = {reinterpret_cast<bf16*>(m.tile(at.lora_row, 0)),
                           reinterpret_cast<bf16*>(m.tile(at.lora_row + 1, 0))};
      pass.low_strip = strip_elements(m.cols);
      pass.lora_steps = m.cols / 32;
    }
    pass.run([&](int block, int blocks) {
      if (!next.term) return Ahead{};
      const int lines = ceil_div(next.steps * 32, format.tile_cols) * format.tile_bytes / kLine;
      if (while_decoding)
        return ahead_part(raw[1], int64_t(lines / 2) * kLine, ceil_div(lines, 2), block, blocks, at.steps);
      return ahead_part(raw[0], next.term->w->strip_bytes, lines, block, blocks, at.steps);
    });
  }
  Tiles::release();
}

template <class V, class Codec>
void tile_gemm_backward(const GemmArgs& a) {
  using Tiles = typename V::Tiles;
  constexpr FormatInfo format = info(Codec::kFormat);
  constexpr int kTileLines = format.tile_bytes / kLine, kPanelsOfTile = format.tile_cols / 32;
  bf16 *const panel = reinterpret_cast<bf16*>(a.scratch), *const lora_panel = panel + kTileReduction * 32;
  const int panels = a.out_count / 32;
  float* const c = a.terms[0].c;
  Tiles::configure();
  for (int i = 0; i < a.count; i++) {
    const GemmTerm& term = a.terms[i];
    const PackedMatrix& w = *term.w;
    const int first_piece = term.out_begin / 32, last_tile = (first_piece + panels - 1) / kPanelsOfTile;
    for (int begin = 0; begin < w.rows; begin += kTileReduction) {
      const int steps = std::min(kTileReduction, w.rows - begin) / 32, next_begin = begin + kTileReduction;
      const int next_steps = std::max(0, std::min(kTileReduction, w.rows - next_begin)) / 32;
      for (int p = 0; p < panels; p++) {
        const int piece = first_piece + p;
        // The first block of tokens is multiplied while the next rows of W are decoded
        const auto decode = [&](int step) {
          if (step < steps)
            decode_pairs<V, Codec>(w, begin / kTileRows + step * 2, 2, piece, panel + step * 2 * kPieceElements);
        };
        decode(0);
        PanelPass<Tiles, true> pass{a};
        pass.weights = {panel, panel + 32};
        pass.lora_weights = {lora_panel, lora_panel + 32};
        pass.x = term.x + begin * kTileRows;
        pass.low_rank = term.low_rank;
        pass.strip = strip_elements(w.rows);
        pass.steps = steps;
        pass.first = begin == 0 && i == 0;
        pass.c = c + result_piece(p, 0, a.tokens);
        if (p + 1 == panels)
          pass.next_c = c;
        else if (!pass.first)
          pass.next_c = c + result_piece(p + 1, 0, a.tokens);
        pass.next_x = next_steps ? term.x + next_begin * kTileRows : nullptr;
        pass.next_lines = next_steps * kTileRows;
        pass.panel = p;
        pass.panels = panels;
        if (term.lora && begin == 0) {
          const PackedMatrix& m = *term.lora;
          decode_pairs<V, Bf16Codec>(m, 0, m.rows / kTileRows, term.lora_begin / 32 + p, lora_panel);
          pass.low_strip = strip_elements(m.rows);
          pass.lora_steps = m.rows / 32;
        }
        // Prefetches the tiles of the next panels, a part with each panel that shares the present tiles. Two strips
        // alternate, one tile at a time: memory delivers 1 KB runs faster than single lines
        const int tile = piece / kPanelsOfTile, part = piece % kPanelsOfTile;
        const bool last = tile == last_tile;
        const int next_tile = last ? first_piece / kPanelsOfTile : tile + 1, strip = (last ? next_begin : begin) / 16;
        const int pairs = last ? next_steps : steps;
        const int first_pair = pairs * part / kPanelsOfTile, end_pair = pairs * (part + 1) / kPanelsOfTile;
        pass.run(
            [&](int block, int blocks) {
              const int each = ceil_div(end_pair - first_pair, blocks), first = first_pair + block * each;
              if (first >= end_pair) return Ahead{};
              const int span = std::max(1, steps / each), lines = ceil_div(kTileLines, span);
              return Ahead{reinterpret_cast<const char*>(w.tile(strip + first * 2, next_tile)),
                           w.strip_bytes,
                           lines,
                           span,
                           span,
                           2 * w.strip_bytes - int64_t(lines) * span * kLine};
            },
            Nothing(), [&](int step) { decode(step + 1); });
      }
    }
  }
  Tiles::release();
}

}  // namespace ktft
