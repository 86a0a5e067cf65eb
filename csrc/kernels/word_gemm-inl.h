// The forward GEMM by products of 16-bit integers, for formats whose weights are whole multiples of their row's scale.
// X becomes fixed point, and sums over kWordBlock columns are exact. An instruction multiplies twice as many words as
// fp32 values, and weights need no conversion to fp32.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/code_dots-inl.h"
#include "kernels/float_gemm-inl.h"

namespace ktft {

template <class V, class Codec>
constexpr bool kHasWords = requires { typename V::Words; } && requires { Codec::kLargestWord; };

// As in a forward panel of floats, four rows of W (4 KB) and 16 tokens (16 KB) of a reduction block stay in L1.
constexpr int kWordBlock = 128, kWordReduction = 512, kWordTokens = 128;

// Each of eight lanes adds up a block's products, two at a time; X has 14 bits and a sign.
template <class Codec>
constexpr bool kSumsFit = int64_t(Codec::kLargestWord) * (1 << 14) * (kWordBlock / 8) <= INT32_MAX;

// 16 rows of X in fixed point, in pieces. Where the pieces of a block are alike, all have the scale of a row's largest
// value there, which costs none of them more than 4 of its 14 bits. Elsewhere one large value must not cost other
// pieces theirs, so each has its own scale, and sums end with each piece.
struct FixedRows {
  static constexpr int kPieces = kWordReduction / 32, kInBlock = kWordBlock / 32, kLostBits = 4;
  alignas(64) int16_t of[kPieces][kTileRows][32];
  float scales[kPieces][kTileRows];
  bool alike[kPieces / kInBlock][kTileRows];

  template <class V>
  void fix(const bf16* x, int pieces) {
    for (int first = 0; first < pieces; first += kInBlock)
      for (int r = 0; r < kTileRows; r++) fix_block<V>(x + r * 32, first, std::min(first + kInBlock, pieces), r);
  }

 private:
  template <class V>
  void fix_block(const bf16* x, int first, int end, int r) {
    int sizes[kInBlock], largest = 0;
    for (int p = first; p < end; p++) {
      sizes[p - first] = V::Codes::largest_magnitude(x + p * kPieceElements);
      largest = std::max(largest, sizes[p - first]);
    }
    const bool near = std::all_of(sizes, sizes + end - first,
                                  [&](int size) { return size == 0 || (largest >> 7) - (size >> 7) <= kLostBits; });
    alike[first / kInBlock][r] = near;
    for (int p = first; p < end; p++) {
      const GroupScale found = fixed_scale(near ? largest : sizes[p - first]);
      scales[p][r] = found.scale;
      if (found.factor)
        V::Words::fix(x + p * kPieceElements, found.factor, of[p][r]);
      else
        std::memset(of[p][r], 0, sizeof of[p][r]);
    }
  }
};

// C[r, j] += sum_i X[row + r, i] W[j, i] for the four rows of W at `w`.
template <class V, int R>
void forward_words(const FixedRows& x, int row, const int16_t* w, int pieces, float* c) {
  using Lanes = typename V::Words::Lanes;
  typename V::F acc[R][4];
  for (auto& each : acc)
    for (auto& a : each) a = V::zero();
  for (int t = 0; t < pieces;) {
    bool alike = true;
    for (int r = 0; r < R; r++) alike &= x.alike[t / FixedRows::kInBlock][row + r];
    const int end = alike ? std::min(t + FixedRows::kInBlock, pieces) : t + 1;
    Lanes sums[R][4];
    for (auto& each : sums)
      for (auto& a : each) a = V::Words::zero();
    for (; t < end; t++, w += 4 * 32)
      for (int s = 0; s < 32; s += V::Words::kStep) {
        Lanes in[R];
        for (int r = 0; r < R; r++) in[r] = V::Words::load(x.of[t][row + r] + s);
        for (int j = 0; j < 4; j++) {
          const Lanes of_w = in_register<V>(V::Words::load(w + j * 32 + s));
          for (int r = 0; r < R; r++) sums[r][j] = in_register<V>(V::Words::dot(sums[r][j], in[r], of_w));
        }
      }
    for (int r = 0; r < R; r++)
      for (int j = 0; j < 4; j++)
        acc[r][j] = V::fma(V::Words::to_float(sums[r][j]), V::set1(x.scales[t - 1][row + r]), acc[r][j]);
  }
  for (int r = 0; r < R; r++) V::add_sums(c + r * 32, acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
}

// C += X W^T for one matrix.
template <class V, class Codec>
void forward_in_words(const GemmArgs& a, const PackedMatrix& w, int out_begin, const bf16* x, float* c) {
  static_assert(kSumsFit<Codec> && V::kForwardCols == 4);
  int16_t* const panel = reinterpret_cast<int16_t*>(a.scratch);
  FixedRows* const rows = reinterpret_cast<FixedRows*>(panel + kWordReduction * kTileRows);
  static_assert(kWordReduction * kTileRows * sizeof(*panel) + kWordTokens / kTileRows * sizeof(FixedRows) <=
                kGemmScratch);
  for (int begin = 0; begin < w.cols; begin += kWordReduction) {
    const int pieces = std::min(kWordReduction, w.cols - begin) / 32;
    for (int token = 0; token < a.tokens; token += kWordTokens) {
      const int tokens = std::min(kWordTokens, a.tokens - token);
      for (int t = 0; t < tokens; t += kTileRows)
        rows[t / kTileRows].fix<V>(x + activation_elements(token + t, w.cols) + begin * kTileRows, pieces);
      for (int out = 0; out < a.out_count; out += kTileRows) {
        for (int t = 0; t < pieces; t++)
          Codec::template decode_words<V>(w, (out_begin + out) / kTileRows, begin / 32 + t, panel + t * 4 * 32,
                                          pieces * 4 * 32);
        const auto ahead =
            StripAhead<V, Codec>::after(w, out_begin, out_begin + a.out_count, out_begin + out, begin, kWordReduction);
        for (int t = 0; t < tokens; t += kTileRows) {
          float* const at = c + result_piece(out / 32, (token + t) / kTileRows, a.tokens) + out % 32;
          for (int j = 0; j < kTileRows; j += 4) {
            if (t == 0) ahead.prefetch_quarter(j / 4);
            each_run<V::kForwardRows>(std::min(kTileRows, tokens - t), [&]<int R>(int r) {
              forward_words<V, R>(rows[t / kTileRows], r, panel + j * pieces * 32, pieces, at + r * 32 + j);
            });
          }
        }
      }
    }
  }
}

}  // namespace ktft
