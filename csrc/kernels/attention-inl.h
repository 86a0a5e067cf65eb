// Attention of one token over keys and values that lie in blocks: softmax(q Kᵀ) V in fp32, for the query heads that
// share keys and values, over one part of the context.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/epilogue-inl.h"

namespace ktft {

constexpr int kAttentionPiece = 128;  // tokens whose values stay in L1 between two runs of columns
constexpr int kScoreRow = kAttentionPiece + kCacheLine / int(sizeof(float));

// Calls f.template operator()<H>(first) for runs of H heads, whose sums stay in registers.
template <class V, class Fn>
void each_heads(int heads, const Fn& f) {
  constexpr int kMost = V::kWidth == 16 ? 8 : 4;
  for (int h = 0; h < heads;) {
    const int left = heads - h;
    if (left >= kMost)
      f.template operator()<kMost>(h), h += kMost;
    else if (left >= 4)
      f.template operator()<4>(h), h += 4;
    else if (left >= 2)
      f.template operator()<2>(h), h += 2;
    else
      f.template operator()<1>(h), h += 1;
  }
}

// Two elements of a sum in every lane, and the factors of both: fp32, or bf16 for products of pairs.
template <class V, bool kPairs = V::kPairs>
struct Two {
  using Factor = float;
  typename V::F first, second;
  static Two zip(const bf16* first, const bf16* second) { return {V::load(first), V::load(second)}; }
  static Two pairs(const bf16* at) { return {V::even(at), V::odd(at)}; }
  typename V::F times(const Factor* factors, typename V::F sum) const {
    return V::fma(second, V::set1(factors[1]), V::fma(first, V::set1(factors[0]), sum));
  }
};
template <class V>
struct Two<V, true> {
  using Factor = bf16;
  typename V::In both;
  static Two zip(const bf16* first, const bf16* second) { return {V::zip(first, second)}; }
  static Two pairs(const bf16* at) { return {V::load_in(at)}; }
  typename V::F times(const Factor* factors, typename V::F sum) const {
    return V::dot(sum, both, V::broadcast_pair(factors));
  }
};
template <class V>
using Factor = typename Two<V>::Factor;

// scores[h][i] = scale q[h] · key token + i, for N vectors of a block's tokens.
template <class V, int H, int N>
void key_vectors(const AttentionArgs& a, const bf16* keys, const Factor<V>* q, int token, float* scores) {
  const int size = a.head_size;
  typename V::F sums[H][N];
  for (int h = 0; h < H; h++)
    for (int n = 0; n < N; n++) sums[h][n] = V::zero();
  const auto add = [&](int d, const auto& key) {
    Two<V> two[N];
    for (int n = 0; n < N; n++) two[n] = key(n);
    for (int h = 0; h < H; h++)
      for (int n = 0; n < N; n++) sums[h][n] = two[n].times(q + h * size + d, sums[h][n]);
  };
  if (a.layout == KvLayout::kColumns) {
    const bf16* at = keys + token;
    for (int d = 0; d < size; d += 2, at += 2 * a.block_size)
      add(d, [&](int n) { return Two<V>::zip(at + n * V::kWidth, at + a.block_size + n * V::kWidth); });
  } else {
    const bf16* at[N];
    for (int n = 0; n < N; n++) {
      const int first = token + n * V::kWidth;
      at[n] = keys + int64_t(first / 16) * 16 * size + first % 16 * 2;
    }
    for (int d = 0; d < size; d += 2) add(d, [&](int n) { return Two<V>::pairs(at[n] + d * 16); });
  }
  const typename V::F scale = V::set1(a.scale);
  for (int h = 0; h < H; h++)
    for (int n = 0; n < N; n++) V::store(scores + h * kScoreRow + n * V::kWidth, V::mul(sums[h][n], scale));
}

// scores[h][i] = scale q[h] · key first + i, for the tokens from `first` to `end` of a block; `first` is a multiple
// of 16.
template <class V, int H>
void key_scores(const AttentionArgs& a, const bf16* keys, const Factor<V>* q, int first, int end, float* scores) {
  int token = first;
  for (; token + V::kWidth < end; token += 2 * V::kWidth)
    key_vectors<V, H, 2>(a, keys, q, token, scores + token - first);
  if (token < end) key_vectors<V, H, 1>(a, keys, q, token, scores + token - first);
}

// The weights of some heads for the tokens of a piece, which begins at token `first` of a block.
struct PieceWeights {
  int first;
  const float* at;  // [heads][kScoreRow]

  const float* of(int head, int token) const { return at + head * kScoreRow + token - first; }
};

// sums[h] = factors[h] sums[h] + the weighted values of the tokens from `begin` to `end` of a block, in N vectors of
// columns from d. Weights stay fp32, as they do in vLLM's kernel for columns.
template <class V, int H, int N>
void value_vectors(const AttentionArgs& a, const bf16* values, const PieceWeights& weights, int begin, int end,
                   const float* factors, int d, float* sums) {
  const int size = a.head_size;
  typename V::F of[H][N];
  for (int h = 0; h < H; h++)
    for (int n = 0; n < N; n++) of[h][n] = V::mul(V::load(sums + h * size + d + n * V::kWidth), V::set1(factors[h]));
  // The other token of a pair may hold anything
  const auto add_one = [&](int token, const auto& value) {
    for (int h = 0; h < H; h++)
      for (int n = 0; n < N; n++) of[h][n] = V::fma(value(n), V::set1(*weights.of(h, token)), of[h][n]);
  };
  const auto add_two = [&](int token, const auto& value) {
    Two<V, false> two[N];
    for (int n = 0; n < N; n++) two[n] = value(n);
    for (int h = 0; h < H; h++)
      for (int n = 0; n < N; n++) of[h][n] = two[n].times(weights.of(h, token), of[h][n]);
  };
  const auto add = [&](const auto& one, const auto& two) {
    int token = begin;
    if (token % 2) add_one(token, [&](int n) { return one(token, n); }), token++;
    for (; token + 1 < end; token += 2) add_two(token, [&](int n) { return two(token, n); });
    if (token < end) add_one(token, [&](int n) { return one(token, n); });
  };
  if (a.layout == KvLayout::kColumns) {
    const auto at = [&](int token, int n) { return values + int64_t(token) * size + d + n * V::kWidth; };
    add([&](int token, int n) { return V::load(at(token, n)); },
        [&](int token, int n) { return Two<V, false>::zip(at(token, n), at(token + 1, n)); });
  } else {
    const auto at = [&](int token, int n) {
      const int column = d + n * V::kWidth;
      return values + int64_t(column / 16) * a.block_size * 16 + column % 16 * 2 + token / 2 * 32;
    };
    add([&](int token, int n) { return token % 2 ? V::odd(at(token, n)) : V::even(at(token, n)); },
        [&](int token, int n) { return Two<V, false>::pairs(at(token, n)); });
  }
  for (int h = 0; h < H; h++)
    for (int n = 0; n < N; n++) V::store(sums + h * size + d + n * V::kWidth, of[h][n]);
}

template <class V, int H>
void weighted_values(const AttentionArgs& a, const bf16* values, const PieceWeights& weights, int begin, int end,
                     const float* factors, float* sums) {
  int d = 0;
  for (; d + V::kWidth < a.head_size; d += 2 * V::kWidth)
    value_vectors<V, H, 2>(a, values, weights, begin, end, factors, d, sums);
  if (d < a.head_size) value_vectors<V, H, 1>(a, values, weights, begin, end, factors, d, sums);
}

// Turns the scores of tokens [begin, end) of a row into weights exp(score - largest), and returns by what earlier sums
// must be multiplied. Scores around them, up to whole vectors, need not be finite.
template <class V>
float softmax_weights(float* scores, int begin, int end, float& largest, float& total) {
  constexpr float kLog2E = 1.44269504f;
  const int padded = ceil_div(end, V::kWidth) * V::kWidth;
  std::fill(scores, scores + begin, -INFINITY);
  std::fill(scores + end, scores + padded, -INFINITY);
  typename V::F most = V::load(scores);
  for (int i = V::kWidth; i < padded; i += V::kWidth) most = V::max(most, V::load(scores + i));
  alignas(64) float lanes[V::kWidth];
  V::store(lanes, most);
  const float now = std::max(largest, *std::max_element(lanes, lanes + V::kWidth));
  const auto weight = [&](typename V::F score) {  // -125 for what is further below the largest; of NaN it is NaN
    const typename V::F below = V::mul(V::add(score, V::set1(-now)), V::set1(kLog2E));
    return power_of_two<V>(V::max(V::set1(-125.f), below));
  };
  typename V::F sum = V::zero();
  for (int i = 0; i < padded; i += V::kWidth) {
    const typename V::F weights = weight(V::load(scores + i));
    V::store(scores + i, weights);
    sum = V::add(sum, weights);
  }
  V::store(lanes, weight(V::set1(largest)));
  largest = now;
  total = total * lanes[0] + V::sum(sum);
  return lanes[0];
}

template <class V>
void attention(const AttentionArgs& a) {
  const int size = a.head_size, block_size = a.block_size;
  float* const scores = reinterpret_cast<float*>(a.scratch);
  float* const factors = scores + a.heads * kScoreRow;
  float* const spare = factors + ceil_div(a.heads, 16) * 16;
  const Factor<V>* q;
  if constexpr (V::kPairs) {
    q = a.query;
  } else {
    for (int i = 0; i < a.heads * size; i += V::kWidth) V::store(spare + i, V::load(a.query + i));
    q = spare;
  }
  std::fill_n(a.values, a.heads * size, 0.f);
  std::fill_n(a.largest, a.heads, -INFINITY);
  std::fill_n(a.total, a.heads, 0.f);
  for (int token = a.begin; token < a.end;) {
    const int block = token / block_size, begin = token % block_size, first = begin / 16 * 16;
    const int end = std::min({first + kAttentionPiece, block_size, a.end - block * block_size});
    const bf16* const keys = a.cache + a.blocks[block] * a.block_stride;
    const bf16* const values = keys + int64_t(block_size) * size;
    each_heads<V>(a.heads,
                  [&]<int H>(int h) { key_scores<V, H>(a, keys, q + h * size, first, end, scores + h * kScoreRow); });
    for (int h = 0; h < a.heads; h++)
      factors[h] = softmax_weights<V>(scores + h * kScoreRow, begin - first, end - first, a.largest[h], a.total[h]);
    each_heads<V>(a.heads, [&]<int H>(int h) {
      const PieceWeights weights{first, scores + h * kScoreRow};
      weighted_values<V, H>(a, values, weights, begin, end, factors + h, a.values + h * size);
    });
    token = block * block_size + end;
  }
}

}  // namespace ktft
