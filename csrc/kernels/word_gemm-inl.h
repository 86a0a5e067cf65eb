// The forward GEMM by products of 16-bit integers (kernels/integer_gemm-inl.h), for formats whose weights are whole
// multiples of their row's scale. An instruction multiplies twice as many words as fp32 values, and weights need no
// conversion to fp32.
#pragma once

#include <algorithm>

#include "kernels/code_dots-inl.h"
#include "kernels/integer_gemm-inl.h"

namespace ktft {

template <class V, class Codec>
constexpr bool kHasWords = requires { typename V::Words; } && requires { Codec::kLargestWord; };

template <class V>
struct WordProducts {
  static constexpr int kReduction = 256, kInputRows = V::Words::kInputRows;
  static constexpr int kGroups = kReduction / kGroup, kPairs = kGroup / 2;
  static constexpr int kBits = 13;  // of X, beside a sign

  struct Row {
    alignas(64) int32_t pairs[kGroups][kPairs];  // two columns each
    float scales[kGroups];

    void fix(const bf16* x, int g) {
      const GroupScale found = fixed_scale<kBits>(V::Codes::largest_magnitude(x));
      scales[g] = found.scale;
      if (found.factor)
        V::Words::fix(x, found.factor, reinterpret_cast<int16_t*>(pairs[g]));
      else
        std::fill_n(pairs[g], kPairs, 0);
    }
  };

  struct Panel {
    alignas(64) int32_t pairs[kGroups][kPairs][kPanelStrips][kTileRows];
  };

  template <class Codec>
  static void decode(const PackedMatrix& w, int strip, int begin, int groups, int s, Panel& panel) {
    static_assert(int64_t(Codec::kLargestWord) * (1 << kBits) * kGroup <= INT32_MAX);
    for (int g = 0; g < groups; g++) {
      alignas(64) int16_t rows[kTileRows][kGroup];
      Codec::template decode_words<V>(w, strip, begin / kGroup + g, rows[0]);
      V::transpose_dwords(rows, sizeof rows[0], panel.pairs[g][0][s], sizeof panel.pairs[g][0]);
    }
  }

  template <int R>
  static void products(const Panel& w, const Row* x, int groups, float* c) {
    using Words = typename V::Words;
    constexpr int kVectors = kPanelOutputs / V::kWidth;
    typename V::F acc[R][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) acc[r][v] = V::load(c + r * 32 + v * V::kWidth);
    for (int g = 0; g < groups; g++) {
      typename Words::Lanes sums[R][kVectors];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) sums[r][v] = Words::zero();
#pragma GCC unroll 16
      for (int i = 0; i < kPairs; i++) {
        typename Words::Lanes in[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) in[r] = Words::in_all_lanes(x[r].pairs[g][i]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
          const auto of_w = in_register<V>(Words::load(w.pairs[g][i][0] + v * V::kWidth));
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) sums[r][v] = in_register<V>(Words::dot(sums[r][v], in[r], of_w));
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const typename V::F scale = V::set1(x[r].scales[g]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) acc[r][v] = V::fma(Words::to_float(sums[r][v]), scale, acc[r][v]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) V::store(c + r * 32 + v * V::kWidth, acc[r][v]);
  }
};

}  // namespace ktft
