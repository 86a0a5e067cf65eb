// RMS norm (arXiv:1910.07467), and what comes before attention in each head: the norm, then rotary embedding
// (arXiv:2104.09864), each rounded to bf16.
#pragma once

#include <cmath>

#include "kernels/kernels.h"

namespace ktft {

// out = norm(x) * weight in fp32, rounded once; out may be x. With a residual, x is added to it first, and the norm is
// taken of their sum.
template <class V>
void norm_row(const NormArgs& a) {
  typename V::F squares = V::zero();
  for (int i = 0; i < a.size; i += V::kWidth) {
    typename V::F x = V::load(a.x + i);
    if (a.residual) {
      x = V::add(x, V::load(a.residual + i));
      V::store(a.residual + i, x);
    }
    squares = V::fma(x, x, squares);
  }
  const bf16* const from = a.residual ? a.residual : a.x;
  const typename V::F factor = V::set1(1 / std::sqrt(V::sum(squares) / float(a.size) + a.epsilon));
  for (int i = 0; i < a.size; i += V::kWidth)
    V::store(a.out + i, V::mul(V::mul(V::load(from + i), factor), V::load(a.weight + i)));
}

// With f = 1 / sqrt(mean(x^2) + epsilon) and g = grad * weight: out = f (g - f^2 x mean(g x)), in fp32, rounded once.
template <class V>
void norm_row_backward(const NormBackwardArgs& a) {
  typename V::F squares = V::zero(), products = V::zero();
  for (int i = 0; i < a.size; i += V::kWidth) {
    const typename V::F x = V::load(a.x + i);
    squares = V::fma(x, x, squares);
    products = V::fma(V::mul(V::load(a.grad + i), V::load(a.weight + i)), x, products);
  }
  const float factor = 1 / std::sqrt(V::sum(squares) / float(a.size) + a.epsilon);
  const typename V::F of_g = V::set1(factor);
  const typename V::F of_x = V::set1(-factor * factor * factor * (V::sum(products) / float(a.size)));
  for (int i = 0; i < a.size; i += V::kWidth) {
    const typename V::F g = V::mul(V::load(a.grad + i), V::load(a.weight + i));
    V::store(a.out + i, V::fma(V::load(a.x + i), of_x, V::mul(g, of_g)));
  }
}

template <class V>
void prepare_heads(const HeadsArgs& a) {
  alignas(64) float x[kMostHeadSize], turn[kMostHeadSize];
  const int half = a.rotary / 2;
  float *const first = x, *const second = x + half;
  const float *const cosines = turn, *const sines = turn + half;
  for (int i = 0; i < a.rotary; i += V::kWidth) V::store(turn + i, V::load(a.turn + i));
  for (int h = 0; h < a.heads; h++) {
    bf16* const head = a.x + h * a.head_size;
    if (a.norm) norm_row<V>({a.head_size, head, nullptr, a.norm, a.epsilon, head});
    for (int i = 0; i < a.rotary; i += V::kWidth) V::store(x + i, V::load(head + i));
    for (int i = 0; i < half; i++) {
      const float left = first[i], right = second[i];
      first[i] = left * cosines[i] - right * sines[i];
      second[i] = right * cosines[i] + left * sines[i];
    }
    for (int i = 0; i < a.rotary; i += V::kWidth) V::store(head + i, V::load(x + i));
  }
}

}  // namespace ktft
