// Elementary functions on an ISA's lanes.
#pragma once

namespace ktft {

// 1 / (1 + e^-x) to about 5e-6: 2^n p(f), -x log2(e) = n + f, |f| <= 1/2, p the degree-5 Taylor polynomial of 2^f.
template <class V>
typename V::F sigmoid(typename V::F x) {
  const typename V::F t = V::min(V::max(V::mul(x, V::set1(-1.44269504f)), V::set1(-125.f)), V::set1(125.f));
  const typename V::F n = V::round(t), f = V::fma(n, V::set1(-1.f), t);
  typename V::F p = V::set1(0.00133335581f);
  for (const float c : {0.00961812911f, 0.0555041087f, 0.240226507f, 0.693147181f, 1.f}) p = V::fma(p, f, V::set1(c));
  return V::reciprocal(V::add(V::set1(1.f), V::scale_by_power(p, n)));
}

}  // namespace ktft
