// The forward GEMM of up to two strips of tokens on tile registers. Decoding takes longer here than the products, and
// memory longer than each. So all three run side by side: while one piece of W is multiplied the next one is decoded,
// and W is prefetched at an even rate.
#pragma once

#include <utility>

#include "kernels/few_tokens-inl.h"
#include "kernels/kernels.h"
#include "quant/codecs.h"

namespace ktft {

constexpr int kFewTileTokens = 2 * kTileRows;
constexpr int kFewTileAhead = 2 << 10;  // the distance of the prefetch in each strip of W, in bytes

// Calls f.template operator()<i>() for 0 <= i < N.
template <int N, class Fn>
__attribute__((always_inline)) static inline void unrolled(const Fn& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    (f.template operator()<I>(), ...);
  }(std::make_integer_sequence<int, N>());
}

// C of kStrips strips of W from `strip` on and kTokens strips of tokens, up to four tiles, which stay in accumulators.
// A piece of X serves all strips of W, since X comes from L2. The strips at `next`, or null, are read after these.
template <class V, class Codec, int kStrips, int kTokens>
void few_tiles_block(const GemmTerm& term, int strip, int lora_strip, const uint8_t* next, float* c) {
  using Tiles = typename V::Tiles;
  constexpr int kRow = 2 * kTileRows * int(sizeof(bf16));
  const PackedMatrix& w = *term.w;
  const int pieces = w.cols / 32;
  const int64_t bytes = int64_t(w.col_tiles()) * info(Codec::kFormat).tile_bytes;
  alignas(64) bf16 decoded[2][kStrips][kPieceElements];
  const bf16* weights[2][kStrips];
  DotAhead further[kStrips];
  for (int s = 0; s < kStrips; s++)
    further[s] = {w.tile(strip + s, 0) + bytes, next ? next + s * w.strip_bytes : nullptr,
                  std::min<int64_t>(kFewTileAhead, bytes)};
  const auto decode = [&](int s, int piece) {
    prefetch(further[s].of(w.tile(strip + s, 0) + piece * kPieceBytes<Codec>), kPieceBytes<Codec>);
    weights[piece % 2][s] = Codec::template decode<V>(w, strip + s, piece, decoded[piece % 2][s]);
  };
  const auto multiply = [&]<int S>(const bf16* of_w) {
    Tiles::template load<4 + S % 2>(of_w, kRow);
    Tiles::template dot<S * kTokens, 4 + S % 2, 6>();
    if constexpr (kTokens == 2) Tiles::template dot<S * kTokens + 1, 4 + S % 2, 7>();
  };
  const auto load_tokens = [&](const bf16* x, int cols) {
    Tiles::template load<6>(x, kRow);
    if constexpr (kTokens == 2) Tiles::template load<7>(x + strip_elements(cols), kRow);
  };
  unrolled<kStrips * kTokens>([]<int T>() { Tiles::template zero<T>(); });
  for (int p = 0; term.lora && p < term.lora->cols / 32; p++) {
    load_tokens(term.low_rank + p * kPieceElements, term.lora->cols);
    unrolled<kStrips>([&]<int S>() {
      const void* const tiles = term.lora->tile(lora_strip + S, 0);
      multiply.template operator()<S>(static_cast<const bf16*>(tiles) + p * kPieceElements);
    });
  }
  for (int s = 0; s < kStrips; s++) decode(s, 0);
  for (int p = 0; p < pieces; p++) {
    load_tokens(term.x + p * kPieceElements, w.cols);
    unrolled<kStrips>([&]<int S>() {
      if (p + 1 < pieces) decode(S, p + 1);
      multiply.template operator()<S>(weights[p % 2][S]);
    });
  }
  unrolled<kStrips * kTokens>([&]<int T>() {  // two strips of W share a panel's results, which have two pieces
    constexpr int kStrip = T / kTokens, kPiece = kStrip / 2 * 2 + T % kTokens;
    Tiles::template store<T>(c + kPiece * kResultPiece + kStrip % 2 * kResultPiece / 2, kCacheLine);
  });
}

template <class V, class Codec>
void few_tiles_forward(const GemmArgs& a) {
  V::Tiles::configure();
  for (int i = 0; i < a.count; i++) {
    const GemmTerm& term = a.terms[i];
    const uint8_t* const after =
        i + 1 < a.count ? a.terms[i + 1].w->tile(a.terms[i + 1].out_begin / kTileRows, 0) : nullptr;
    const int strips = a.out_count / kTileRows, first = term.out_begin / kTileRows;
    for (int s = 0; s < strips;) {
      const int lora_strip = term.lora_begin / kTileRows + s;
      float* const c = term.c + result_piece(s / 2, 0, a.tokens);
      const auto run = [&]<int kStrips, int kTokens>() {
        const uint8_t* const next = s + kStrips < strips ? term.w->tile(first + s + kStrips, 0) : after;
        few_tiles_block<V, Codec, kStrips, kTokens>(term, first + s, lora_strip, next, c);
        s += kStrips;
      };
      if (a.tokens > kTileRows)
        run.template operator()<2, 2>();
      else if (s + 4 <= strips)
        run.template operator()<4, 1>();
      else
        run.template operator()<2, 1>();
    }
  }
  V::Tiles::release();
}

}  // namespace ktft
