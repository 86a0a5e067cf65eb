// Attention of one token over keys and values that lie in blocks: softmax(q Kᵀ) V in fp32, for the query heads that
// share keys and values, over one part of the context.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/epilogue-inl.h"
#include "kernels/row_runs-inl.h"

namespace ktft {

constexpr int kAttentionPiece = 128;  // tokens whose values stay in L1 between two runs of columns
constexpr int kScoreRow = kAttentionPiece + kCacheLine / int(sizeof(float));

// Heads whose sums stay in registers, two vectors each.
template <class V>
constexpr int kMostHeads = V::kWidth == 16 ? 8 : 4;

// Two rows of keys in every lane, and the query's values for both: fp32, or bf16 for products of pairs.
template <class V>
struct TwoRows {
  using Query = float;
  typename V::F first, second;
  TwoRows(const bf16* first, const bf16* second) : first(V::load(first)), second(V::load(second)) {}
  explicit TwoRows(const bf16* pairs) : first(V::even(pairs)), second(V::odd(pairs)) {}
  typename V::F times(const Query* q, typename V::F sum) const {
    return V::fma(second, V::set1(q[1]), V::fma(first, V::set1(q[0]), sum));
  }
};
template <class V>
  requires(V::kPairs)
struct TwoRows<V> {
  using Query = bf16;
  typename V::In both;
  TwoRows(const bf16* first, const bf16* second) : both(V::zip(first, second)) {}
  explicit TwoRows(const bf16* pairs) : both(V::load_in(pairs)) {}
  typename V::F times(const Query* q, typename V::F sum) const { return V::dot(sum, both, V::broadcast_pair(q)); }
};
template <class V>
using Query = typename TwoRows<V>::Query;

// scores[h][i] = scale q[h] · key i, for N vectors of a block's tokens, of which the first is `token`.
template <class V, int H, int N, bool kInPairs>
void key_vectors(const AttentionArgs& a, const bf16* keys, int token, const Query<V>* q, float* scores) {
  const int size = a.head_size;
  const bf16* at[N];
  for (int n = 0; n < N; n++, token += V::kWidth)
    at[n] = keys + (kInPairs ? int64_t(token / 16 * 16) * size + token % 16 * 2 : token);
  typename V::F sums[H][N];
  for (int h = 0; h < H; h++)
    for (int n = 0; n < N; n++) sums[h][n] = V::zero();
  for (int d = 0; d < size; d += 2)
    for (int n = 0; n < N; n++) {
      const TwoRows<V> rows = [&] {
        if constexpr (kInPairs) return TwoRows<V>(at[n] + d * 16);
        return TwoRows<V>(at[n] + d * a.block_size, at[n] + (d + 1) * a.block_size);
      }();
      for (int h = 0; h < H; h++) sums[h][n] = rows.times(q + h * size + d, sums[h][n]);
    }
  const typename V::F scale = V::set1(a.scale);
  for (int h = 0; h < H; h++)
    for (int n = 0; n < N; n++) V::store(scores + h * kScoreRow + n * V::kWidth, V::mul(sums[h][n], scale));
}

// The same for the tokens from `first`, a multiple of 16, to `end`, rounded up to whole vectors.
template <class V, int H, bool kInPairs>
void key_scores(const AttentionArgs& a, const bf16* keys, int first, int end, const Query<V>* q, float* scores) {
  int token = first;
  for (; token + V::kWidth < end; token += 2 * V::kWidth)
    key_vectors<V, H, 2, kInPairs>(a, keys, token, q, scores + token - first);
  if (token < end) key_vectors<V, H, 1, kInPairs>(a, keys, token, q, scores + token - first);
}

// sums[h] = factors[h] sums[h] + values weighted with weights[h], of a block's tokens from `begin` to `end`, in N
// vectors of columns from d on. Weights stay fp32, as in vLLM's kernels for plain layouts.
template <class V, int H, int N, bool kInPairs>
void value_vectors(const AttentionArgs& a, const bf16* values, int begin, int end, int d, const float* weights,
                   const float* factors, float* sums) {
  const int size = a.head_size;
  sums += d;
  typename V::F of[H][N];
  for (int h = 0; h < H; h++)
    for (int n = 0; n < N; n++) of[h][n] = V::mul(V::load(sums + h * size + n * V::kWidth), V::set1(factors[h]));
  const auto add = [&](int token, int n, typename V::F value) {
    for (int h = 0; h < H; h++) of[h][n] = V::fma(value, V::set1(weights[h * kScoreRow + token - begin]), of[h][n]);
  };
  if constexpr (kInPairs) {
    const bf16* at[N];
    for (int n = 0; n < N; n++, d += V::kWidth) at[n] = values + int64_t(d / 16 * 16) * a.block_size + d % 16 * 2;
    for (int token = begin / 2 * 2; token < end; token += 2)  // places outside may hold anything, NaN too
      for (int n = 0; n < N; n++) {
        if (token >= begin) add(token, n, V::even(at[n] + token * 16));
        if (token + 1 < end) add(token + 1, n, V::odd(at[n] + token * 16));
      }
  } else {
    values += int64_t(begin) * size + d;
    for (int token = begin; token < end; token++, values += size)
      for (int n = 0; n < N; n++) add(token, n, V::load(values + n * V::kWidth));
  }
  for (int h = 0; h < H; h++)
    for (int n = 0; n < N; n++) V::store(sums + h * size + n * V::kWidth, of[h][n]);
}

// The same in all columns.
template <class V, int H, bool kInPairs>
void weighted_values(const AttentionArgs& a, const bf16* values, int begin, int end, const float* weights,
                     const float* factors, float* sums) {
  int d = 0;
  for (; d + V::kWidth < a.head_size; d += 2 * V::kWidth)
    value_vectors<V, H, 2, kInPairs>(a, values, begin, end, d, weights, factors, sums);
  if (d < a.head_size) value_vectors<V, H, 1, kInPairs>(a, values, begin, end, d, weights, factors, sums);
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

template <class V, bool kInPairs>
void attention_over(const AttentionArgs& a) {
  const int size = a.head_size, block_size = a.block_size;
  float* const scores = reinterpret_cast<float*>(a.scratch);
  float* const factors = scores + a.heads * kScoreRow;
  float* const spare = factors + ceil_div(a.heads, 16) * 16;
  const Query<V>* q;
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
    each_run<kMostHeads<V>>(a.heads, [&]<int H>(int h) {
      key_scores<V, H, kInPairs>(a, keys, first, end, q + h * size, scores + h * kScoreRow);
    });
    for (int h = 0; h < a.heads; h++)
      factors[h] = softmax_weights<V>(scores + h * kScoreRow, begin - first, end - first, a.largest[h], a.total[h]);
    each_run<kMostHeads<V>>(a.heads, [&]<int H>(int h) {
      weighted_values<V, H, kInPairs>(a, values, begin, end, scores + h * kScoreRow + begin - first, factors + h,
                                      a.values + h * size);
    });
    token = block * block_size + end;
  }
}

template <class V>
void attention(const AttentionArgs& a) {
  (a.pairs ? attention_over<V, true> : attention_over<V, false>)(a);
}

}  // namespace ktft
