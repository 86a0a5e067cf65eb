// Products of one strip of W, 16 outputs, with a few rows of X that lie anywhere: what decoding tokens needs, where
// every expert has a few rows and each row meets several experts. A row is prepared once for all of them.
#pragma once

#include "kernels/few_tokens-inl.h"

namespace ktft {

template <class V, class Codec>
int64_t strip_row_bytes(int cols) {
  if constexpr (kDotsCodes<V, Codec>)
    return int64_t(ceil_div(cols, info(Codec::kFormat).tile_cols)) * int64_t(sizeof(FixedPointOf<V, Codec>));
  else
    return int64_t(in_lines(size_t(cols) * sizeof(bf16)));
}

template <class V, class Codec>
void place_strip_row(const bf16* row, int cols, int activation_bits, void* out) {
  if constexpr (kDotsBytes<V, Codec>)
    if (activation_bits == 8)
      return fix_row<V>(row, cols, kGroup, static_cast<FixedPointOf<V, Codec, kBytesOnly>*>(out));
  if constexpr (kDotsCodes<V, Codec>)
    fix_row<V>(row, cols, kGroup, static_cast<FixedPointOf<V, Codec>*>(out));
  else
    std::memcpy(out, row, size_t(cols) * sizeof(bf16));
}

template <class V, class Codec, int kTerms>
void code_strip(const StripArgs& a, const DotAhead& further, float* by_output) {
  const FixedPointOf<V, Codec, kTerms>* rows[kStripRows];
  for (int t = 0; t < a.tokens; t++) rows[t] = static_cast<const FixedPointOf<V, Codec, kTerms>*>(a.rows[t]);
  dot_codes_strip<V, Codec>(*a.w, a.strip, rows, a.tokens, further, by_output);
}

template <class V, class Codec>
void strip_product(const StripArgs& a) {
  float spare[kTileRows * kStripRows];  // for several rows, whose results come output by output
  float* const by_output = a.tokens == 1 ? a.results : spare;
  std::fill_n(by_output, kTileRows * a.tokens, 0.f);
  const int64_t bytes = int64_t(a.w->col_tiles()) * info(Codec::kFormat).tile_bytes;
  const DotAhead further{a.w->tile(a.strip, 0) + bytes, a.next, std::min<int64_t>(kDotAhead, bytes)};
  if constexpr (kDotsCodes<V, Codec>) {
    a.activation_bits == 8 ? code_strip<V, Codec, kTermsOfBytes<V, Codec>>(a, further, by_output)
                           : code_strip<V, Codec, kExact>(a, further, by_output);
  } else {
    alignas(64) bf16 panel[kDotPieces * kPieceElements];
    const bf16* rows[kStripRows];
    for (int t = 0; t < a.tokens; t++) rows[t] = static_cast<const bf16*>(a.rows[t]);
    each_few(a.tokens, [&]<int M>(int t) {
      dot_strip<V, Codec, M>(*a.w, a.strip, rows + t, panel, further, a.tokens, by_output + t);
    });
  }
  for (int t = 0; t < a.tokens && by_output == spare; t++)
    for (int r = 0; r < kTileRows; r++) a.results[t * kTileRows + r] = by_output[r * a.tokens + t];
}

template <class V, bool Cubic>
void swiglu_strip_of(const Swiglu& function, const float* gate, const float* up, const Affine& gate_out,
                     const Affine& up_out, bf16* h) {
  const SwigluLanes<V, Cubic> f(function);
  for (int i = 0; i < kTileRows; i += V::kWidth)
    V::store(h + i, f.h(apply<V>(gate + i, affine_at(gate_out, i)), apply<V>(up + i, affine_at(up_out, i))));
}

template <class V>
void swiglu_strip(const Swiglu& function, const float* gate, const float* up, const Affine& gate_out,
                  const Affine& up_out, bf16* h) {
  if (function.gated)
    return (function.cubic ? swiglu_strip_of<V, true> : swiglu_strip_of<V, false>)(function, gate, up, gate_out, up_out,
                                                                                   h);
  for (int i = 0; i < kTileRows; i += V::kWidth) {
    const typename V::F u = V::max(apply<V>(up + i, affine_at(up_out, i)), V::zero());
    V::store(h + i, V::mul(u, u));
  }
}

}  // namespace ktft
