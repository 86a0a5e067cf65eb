// Row-wise operations and the small fp32 GEMMs of LoRA, for any ISA.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/kernels.h"

namespace ktft {

template <class V, int R, int C>
void nt_micro(int k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, float alpha) {
  typename V::F acc[R][C];
  for (auto& row : acc)
    for (auto& v : row) v = V::zero();
  for (int p = 0; p < k; p += V::kWidth) {
    typename V::F rows[C];
    for (int j = 0; j < C; j++) rows[j] = V::load(b + j * ldb + p);
    for (int i = 0; i < R; i++) {
      const typename V::F v = V::load(a + i * lda + p);
      for (int j = 0; j < C; j++) acc[i][j] = V::fma(v, rows[j], acc[i][j]);
    }
  }
  for (int i = 0; i < R; i++)
    for (int j = 0; j < C; j++) c[i * ldc + j] += alpha * V::sum(acc[i][j]);
}

template <class V>
void gemm_nt(int m, int n, int k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
             float alpha) {
  int i = 0;
  for (; i + 4 <= m; i += 4) {
    int j = 0;
    for (; j + 2 <= n; j += 2) nt_micro<V, 4, 2>(k, a + i * lda, lda, b + j * ldb, ldb, c + i * ldc + j, ldc, alpha);
    for (; j < n; j++) nt_micro<V, 4, 1>(k, a + i * lda, lda, b + j * ldb, ldb, c + i * ldc + j, ldc, alpha);
  }
  for (; i < m; i++)
    for (int j = 0; j < n; j++) nt_micro<V, 1, 1>(k, a + i * lda, lda, b + j * ldb, ldb, c + i * ldc + j, ldc, alpha);
}

template <class V, int R>
void nn_micro(int k, const float* a, int64_t row_stride, int64_t col_stride, const float* b, int64_t ldb, float* c,
              int64_t ldc, float alpha) {
  constexpr int kVectors = V::kWidth >= 16 ? 1 : 16 / V::kWidth;
  typename V::F acc[R][kVectors];
  for (auto& row : acc)
    for (auto& v : row) v = V::zero();
  for (int p = 0; p < k; p++) {
    typename V::F row[kVectors];
    for (int j = 0; j < kVectors; j++) row[j] = V::load(b + p * ldb + j * V::kWidth);
    for (int i = 0; i < R; i++) {
      const typename V::F v = V::set1(a[i * row_stride + p * col_stride]);
      for (int j = 0; j < kVectors; j++) acc[i][j] = V::fma(v, row[j], acc[i][j]);
    }
  }
  for (int i = 0; i < R; i++)
    for (int j = 0; j < kVectors; j++) {
      float* at = c + i * ldc + j * V::kWidth;
      V::store(at, V::fma(V::set1(alpha), acc[i][j], V::load(at)));
    }
}

template <class V>
void gemm_nn(int m, int n, int k, const float* a, int64_t row_stride, int64_t col_stride, const float* b, int64_t ldb,
             float* c, int64_t ldc, float alpha) {
  for (int j = 0; j < n; j += 16) {
    int i = 0;
    for (; i + 4 <= m; i += 4)
      nn_micro<V, 4>(k, a + i * row_stride, row_stride, col_stride, b + j, ldb, c + i * ldc + j, ldc, alpha);
    for (; i < m; i++)
      nn_micro<V, 1>(k, a + i * row_stride, row_stride, col_stride, b + j, ldb, c + i * ldc + j, ldc, alpha);
  }
}

// e^x to about 2 ulp: 2^n * p(f), x = (n + f) ln 2, |f| <= 1/2, p the degree-6 Taylor polynomial of 2^f.
template <class V>
typename V::F exp(typename V::F x) {
  x = V::min(V::max(x, V::set1(-87.f)), V::set1(88.f));
  const typename V::F n = V::round(V::mul(x, V::set1(1.44269504f)));
  typename V::F f = V::fma(n, V::set1(-0.693145752f), x);
  f = V::fma(n, V::set1(-1.42860677e-6f), f);
  typename V::F p = V::set1(1.f / 720);
  for (const float c : {1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f}) p = V::fma(p, f, V::set1(c));
  return V::scale_by_power(p, n);
}

template <class V>
typename V::F sigmoid(typename V::F x) {
  const typename V::F one = V::set1(1.f);
  return V::div(one, V::add(one, exp<V>(V::mul(x, V::set1(-1.f)))));
}

template <class V>
void silu_mul(int n, const float* g, const float* u, bf16* h) {
  for (int i = 0; i < n; i += V::kWidth) {
    const typename V::F gate = V::load(g + i);
    V::store(h + i, V::mul(V::mul(gate, sigmoid<V>(gate)), V::load(u + i)));
  }
}

template <class V>
float silu_mul_backward(int n, float w, const float* dh, const bf16* g, const bf16* u, float* dg, float* du, float* h) {
  typename V::F dot = V::zero();
  const typename V::F one = V::set1(1.f), minus = V::set1(-1.f), weight = V::set1(w);
  for (int i = 0; i < n; i += V::kWidth) {
    const typename V::F gate = V::load(g + i), up = V::load(u + i), grad = V::load(dh + i);
    const typename V::F s = sigmoid<V>(gate), silu = V::mul(gate, s), out = V::mul(silu, up);
    dot = V::fma(grad, out, dot);
    const typename V::F scaled = V::mul(grad, weight);
    // SiLU'(g) = s + g s (1 - s)
    const typename V::F slope = V::fma(silu, V::fma(s, minus, one), s);
    V::store(dg + i, V::mul(V::mul(scaled, up), slope));
    V::store(du + i, V::mul(scaled, silu));
    V::store(h + i, out);
  }
  return V::sum(dot);
}

template <class V>
void widen(int n, const bf16* x, float* y) {
  for (int i = 0; i < n; i += V::kWidth) V::store(y + i, V::load(x + i));
}

template <class V>
void narrow(int n, const float* x, bf16* y) {
  for (int i = 0; i < n; i += V::kWidth) V::store(y + i, V::load(x + i));
}

template <class V>
void narrow_scaled(int n, const float* x, const float* scale, bf16* y) {
  for (int i = 0; i < n; i += V::kWidth) V::store(y + i, V::mul(V::load(x + i), V::load(scale + i)));
}

template <class V>
void add_scaled(int n, float alpha, const float* x, float* y) {
  for (int i = 0; i < n; i += V::kWidth) V::store(y + i, V::fma(V::set1(alpha), V::load(x + i), V::load(y + i)));
}

// A counter-based generator: the bits depend on (key, element) alone, so backward and a recomputed forward see the
// same mask. The mixer is the 32-bit finalizer "lowbias32" (C. Wellons, hash-prospector).
template <class V>
void dropout(int n, float* x, uint64_t key, uint32_t first, float probability) {
  const uint32_t low = uint32_t(key), high = uint32_t(key >> 32);
  const uint32_t threshold = uint32_t(double(probability) * 4294967296.0);
  const float keep = 1.f / (1.f - probability);
  for (int i = 0; i < n; i++) {
    uint32_t z = (first + uint32_t(i)) * 0x9e3779b9u ^ low;
    z ^= z >> 16;
    z *= 0x7feb352du;
    z ^= z >> 15;
    z *= 0x846ca68bu;
    z ^= z >> 16;
    x[i] = (z ^ high) < threshold ? 0.f : x[i] * keep;
  }
}

}  // namespace ktft
