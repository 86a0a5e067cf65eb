// Elementary functions on an ISA's lanes.
#pragma once

#include <cmath>

namespace ktft {

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

}  // namespace ktft
