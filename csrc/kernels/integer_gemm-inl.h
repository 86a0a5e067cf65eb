// The forward GEMM on vectors of integers. Lanes are outputs: W is decoded to a panel of 32 outputs, of which each
// column (or pair, or four of them) is multiplied by the same value of X in all lanes. X becomes integers with a scale
// for each token and 32 columns, so a sum is exact over these, and then becomes fp32. What the integers are, `Of` says:
//   Panel, Row       decoded weights, a row of X, of kReduction columns; Row::fix makes 32 columns of it integers
//   kReduction       the panel's block (18 or 16 KB) stays in L1, kIntegerTokens rows of X (72 to 144 KB) in L2
//   kInputRows       rows of X whose sums stay in registers
//   decode<Codec>    decodes columns of a strip of W to be the panel's strip s
//   products<R>      adds the panel's products with R rows of X to c, whose rows are 32 elements apart
#pragma once

#include <algorithm>

#include "kernels/kernels.h"
#include "kernels/row_runs-inl.h"
#include "quant/codecs.h"

namespace ktft {

constexpr int kIntegerTokens = 128;
constexpr int kPanelStrips = 2, kPanelOutputs = kPanelStrips * kTileRows;

// The bytes of W that are decoded next, of which each run of rows prefetches a part.
template <class V>
struct PanelAhead {
  static constexpr int kParts = 4;
  const uint8_t* tile = nullptr;  // the first strip's; or null
  int64_t strip_bytes = 0, bytes = 0;

  void prefetch_parts(int begin, int end) const {
    if (!tile) return;
    const int64_t from = bytes * begin / kParts, to = bytes * end / kParts;
    for (int s = 0; s < kPanelStrips; s++) prefetch(tile + s * strip_bytes + from, size_t(to - from));
  }
};

// C += X W^T for all terms, which share X.
template <class V, class Codec, class Of>
void forward_in_integers(const GemmArgs& a) {
  constexpr FormatInfo format = info(Codec::kFormat);
  auto& panel = *reinterpret_cast<typename Of::Panel*>(a.scratch);
  auto* const rows = reinterpret_cast<typename Of::Row*>(&panel + 1);
  static_assert(sizeof panel + kIntegerTokens * sizeof *rows <= kGemmScratch);
  const int cols = a.terms[0].w->cols;
  const auto after = [&](int i, int out, int begin) -> PanelAhead<V> {
    out += kPanelOutputs;
    if (out == a.out_count) out = 0, i++;
    if (i == a.count) i = 0, begin += Of::kReduction;
    if (begin >= cols) return {};
    const GemmTerm& term = a.terms[i];
    return {term.w->tile((term.out_begin + out) / kTileRows, begin / format.tile_cols), term.w->strip_bytes,
            int64_t(ceil_div(std::min(Of::kReduction, cols - begin), format.tile_cols)) * format.tile_bytes};
  };
  for (int begin = 0; begin < cols; begin += Of::kReduction) {
    const int groups = std::min(Of::kReduction, cols - begin) / kGroup;
    for (int token = 0; token < a.tokens; token += kIntegerTokens) {
      const int tokens = std::min(kIntegerTokens, a.tokens - token);
      for (int t = 0; t < tokens; t += kTileRows) {  // piece by piece, as X lies
        const bf16* const x = a.terms[0].x + activation_elements(token + t, cols) + begin * kTileRows;
        for (int g = 0; g < groups; g++)
          for (int r = 0; r < std::min(kTileRows, tokens - t); r++) rows[t + r].fix(x + g * kPieceElements + r * 32, g);
      }
      for (int i = 0; i < a.count; i++) {
        const GemmTerm& term = a.terms[i];
        for (int out = 0; out < a.out_count; out += kPanelOutputs) {
          for (int s = 0; s < kPanelStrips; s++)
            Of::template decode<Codec>(*term.w, (term.out_begin + out) / kTileRows + s, begin, groups, s, panel);
          const auto ahead = token == 0 ? after(i, out, begin) : PanelAhead<V>{};
          float* const c = term.c + result_piece(out / 32, token / kTileRows, a.tokens);
          each_run<Of::kInputRows>(tokens, [&]<int R>(int t) {
            ahead.prefetch_parts(t * ahead.kParts / tokens, (t + R) * ahead.kParts / tokens);
            Of::template products<R>(panel, rows + t, groups, c + t * 32);
          });
        }
      }
    }
  }
}

}  // namespace ktft
