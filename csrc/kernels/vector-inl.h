// The layer's operations on rows other than products, for any ISA.
#pragma once

#include "kernels/kernels.h"

namespace ktft {

template <class V>
void pack_rows(const bf16* const* rows, int cols, bf16* out) {
  for (int c = 0; c < cols; c += 32, out += kPieceElements)
    for (int r = 0; r < kTileRows; r++)
      if (rows[r])
        std::memcpy(out + r * 32, rows[r] + c, 32 * sizeof(bf16));
      else
        std::memset(out + r * 32, 0, 32 * sizeof(bf16));
}

template <class V>
void pack_turned(const bf16* const* rows, int cols, bf16* out) {
  alignas(64) bf16 piece[kPieceElements];
  for (int c = 0; c < cols; c += 32, out += kPieceElements) {
    const bf16* at[kTileRows];
    for (int r = 0; r < kTileRows; r++) at[r] = rows[r] ? rows[r] + c : nullptr;
    pack_rows<V>(at, 32, piece);
    V::transpose_dwords(piece, 64, out, 64);
  }
}

template <class V>
bool finite(int n, const bf16* x) {
  typename V::F sums[2] = {V::zero(), V::zero()};  // of x * 0: zero, or NaN
  for (int i = 0; i < n; i += 2 * V::kWidth)
    for (int j = 0; j < 2; j++) sums[j] = V::fma(V::load(x + i + j * V::kWidth), V::zero(), sums[j]);
  return V::sum(V::add(sums[0], sums[1])) == 0;
}

template <class V, class From, class To>
void convert(int n, const From* x, To* y) {
  for (int i = 0; i < n; i += V::kWidth) V::store(y + i, V::load(x + i));
}

template <class V>
void scale_row(int n, const bf16* x, const float* scale, bf16* y) {
  for (int i = 0; i < n; i += V::kWidth) V::store(y + i, V::mul(V::load(x + i), V::load(scale + i)));
}

template <class V>
void split(int n, const float* x, float factor, bf16* high, bf16* low) {
  const typename V::F f = V::set1(factor), minus = V::set1(-1.f);
  for (int i = 0; i < n; i += V::kWidth) {
    const typename V::F v = V::mul(V::load(x + i), f);
    V::store(high + i, v);
    V::store(low + i, V::fma(V::load(high + i), minus, v));
  }
}

template <class V>
float dot(int n, const bf16* x, const float* y) {
  typename V::F sum = V::zero();
  for (int i = 0; i < n; i += V::kWidth) sum = V::fma(V::load(x + i), V::load(y + i), sum);
  return V::sum(sum);
}

template <class V>
void weighted_sum(int n, int rows, const bf16* const* x, const float* weights, float* y) {
  for (int i = 0; i < n; i += V::kWidth) {
    typename V::F sum = V::zero();
    for (int r = 0; r < rows; r++) sum = V::fma(V::set1(weights[r]), V::load(x[r] + i), sum);
    V::store(y + i, sum);
  }
}

// A counter-based generator: its bits depend only on (key, element), so backward and a recomputed forward see the same
// mask. The mixer is the 32-bit finalizer "lowbias32" (C. Wellons, hash-prospector).
template <class V>
uint32_t dropout_mask(uint64_t key, uint32_t first, float probability) {
  const uint32_t low = uint32_t(key), high = uint32_t(key >> 32);
  const uint32_t threshold = uint32_t(double(probability) * 4294967296.0);
  uint32_t stays[32], mask = 0;
  for (uint32_t i = 0; i < 32; i++) {
    uint32_t z = (first + i) * 0x9e3779b9u ^ low;
    z ^= z >> 16;
    z *= 0x7feb352du;
    z ^= z >> 15;
    z *= 0x846ca68bu;
    z ^= z >> 16;
    stays[i] = (z ^ high) < threshold ? 0u : 1u << i;
  }
  for (uint32_t bit : stays) mask |= bit;
  return mask;
}

}  // namespace ktft
