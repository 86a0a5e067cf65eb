// How the vector GEMMs divide rows among micro-kernels, and what these have in common.
#pragma once

namespace ktft {

// Keeps GCC from reading a vector anew for each of its products.
template <class V, class T>
T in_register(T v) {
  __asm__("" : "+v"(v));
  return v;
}

// Calls f.template operator()<R>(first) for runs of 1 <= R <= Max rows that cover the strip's `rows`. The runs have
// similar lengths, and no tail needs masked code.
template <int Max, int R = Max, class Fn>
void with_rows(int rows, int first, const Fn& f) {
  if constexpr (R > 1) {
    if (rows < R) return with_rows<Max, R - 1>(rows, first, f);
  }
  f.template operator()<R>(first);
}
template <int Max, class Fn>
void each_run(int rows, const Fn& f) {
  const int runs = (rows + Max - 1) / Max;
  for (int i = 0; i < runs; i++) with_rows<Max>(rows * (i + 1) / runs - rows * i / runs, rows * i / runs, f);
}

}  // namespace ktft
