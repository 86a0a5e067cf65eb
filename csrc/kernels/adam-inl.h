// Adam with decoupled weight decay (AdamW), element by element, for any ISA.
#pragma once

#include "kernels/kernels.h"

namespace ktft {

// Every ISA does the same operations in the same order for every element, the tail included. Every product that is
// added to something is a V::fma, so that the compiler has no choice: ISAs with that instruction give the same fp32
// bits. Cache lines are read before they are written, so non-temporal stores would save nothing.
template <class V, class T>
void adam(int64_t n, const AdamStep& step, const T* grad, T* param, T* exp_avg, T* exp_avg_sq) {
  using F = typename V::F;
  const F decay = V::set1(step.decay), minus = V::set1(-1.f), first = V::set1(step.first_weight),
          beta2 = V::set1(step.beta2), second = V::set1(step.second_weight), root = V::set1(step.root_scale),
          eps = V::set1(step.eps), size = V::set1(-step.size);
  const auto update = [&](const T* g_at, T* p_at, T* m_at, T* v_at) {
    // All loads come first. The tensors have the same offsets within their pages, and a load waits for an earlier store
    // whose address has the same last 12 bits.
    const F g = V::load(g_at), p = V::load(p_at), old_m = V::load(m_at), old_v = V::load(v_at);
    const F m = V::fma(V::fma(old_m, minus, g), first, old_m);
    const F v = V::fma(V::mul(g, second), g, V::mul(old_v, beta2));
    V::store(m_at, m);
    V::store(v_at, v);
    const F denominator = V::fma(V::sqrt(v), root, eps);
    V::store(p_at, V::fma(p, decay, V::div(V::mul(m, size), denominator)));
  };
  constexpr int kWidth = V::kWidth;
  const int64_t whole = n - n % kWidth;
  for (int64_t i = 0; i < whole; i += kWidth) update(grad + i, param + i, exp_avg + i, exp_avg_sq + i);
  if (whole == n) return;
  T rest[4][kWidth] = {};
  T* const from[4] = {const_cast<T*>(grad) + whole, param + whole, exp_avg + whole, exp_avg_sq + whole};
  const size_t bytes = size_t(n - whole) * sizeof(T);
  for (int k = 0; k < 4; k++) std::memcpy(rest[k], from[k], bytes);
  update(rest[0], rest[1], rest[2], rest[3]);
  for (int k = 1; k < 4; k++) std::memcpy(from[k], rest[k], bytes);
}

}  // namespace ktft
