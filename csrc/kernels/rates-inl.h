// The highest rates at which an ISA multiplies: from registers, and with the GEMMs' own inner loop on operands that
// stay in L1 and L2, without decoding. The benchmark compares whole layers with them.
#pragma once

#include "kernels/epilogue-inl.h"
#include "kernels/gemm-inl.h"
#include "kernels/tile_gemm-inl.h"

namespace ktft {

constexpr int kRateTokens = 128;  // 128 x 512 x 2 bytes stay in L2
constexpr int kRateReduction = kTileReduction;

// Values are small enough for sums to stay finite, but not zero, because zeros would draw less power.
static inline void fill_rate_memory(char* memory) {
  bf16* const values = reinterpret_cast<bf16*>(memory);
  for (size_t i = 0; i < kRateMemory / sizeof(bf16); i++)
    values[i] = to_bf16((i % 2 ? 1.f : -1.f) * float(i * 37 % 101 + 1) / 4096);
}

template <class Tiles>
int64_t tile_register_rate(const char* memory) {
  constexpr int kRounds = 1024;  // enough to make the cost of configuring tiles negligible
  Tiles::configure();
  Tiles::template zero<0>();
  Tiles::template zero<1>();
  Tiles::template zero<2>();
  Tiles::template zero<3>();
  Tiles::template load<4>(memory, 64);
  Tiles::template load<5>(memory + kCodeBytes, 64);
  Tiles::template load<6>(memory + 2 * kCodeBytes, 64);
  Tiles::template load<7>(memory + 3 * kCodeBytes, 64);
  for (int i = 0; i < kRounds; i++) {
    Tiles::template dot<0, 4, 6>();
    Tiles::template dot<1, 4, 7>();
    Tiles::template dot<2, 5, 6>();
    Tiles::template dot<3, 5, 7>();
  }
  Tiles::release();
  return int64_t(kRounds) * 4 * 2 * 16 * 16 * 32;
}

template <class V>
int64_t vector_register_rate(const char* memory) {
  constexpr int kRounds = 1 << 16, kChains = 12;  // with two operands, they fit in 16 registers
  const bf16* const values = reinterpret_cast<const bf16*>(memory);
  const typename V::In x = V::load_in(values), w = V::load_in(values + V::kStep);
  typename V::F acc[kChains];
  for (auto& a : acc) a = V::zero();
  for (int i = 0; i < kRounds; i++)
    for (auto& a : acc) {
      a = V::dot(a, x, w);
      __asm__ volatile("" : "+x"(a));  // keeps the products apart and in registers
    }
  return int64_t(kRounds) * kChains * 2 * V::kStep;
}

// Adds the products of one panel of weights (32 outputs on tiles, 16 on vectors) and kRateTokens tokens.
template <class V>
int64_t hot_rate(char* memory) {
  bf16* const panel = reinterpret_cast<bf16*>(memory);
  bf16* const x = panel + kRateReduction * 32;
  float* const c = reinterpret_cast<float*>(memory + kRateMemory) - kRateTokens * 32;
  if constexpr (kHasTiles<V>) {
    constexpr int kRounds = 8;
    const GemmArgs args{{}, 1, 32, kRateTokens, nullptr};
    PanelPass<typename V::Tiles, false> pass{args};
    pass.weights = {panel, panel + kRateReduction * 16};
    pass.x = x;
    pass.strip = kRateReduction * kTileRows;
    pass.steps = kRateReduction / 32;
    pass.c = c;
    pass.next_c = c;
    V::Tiles::configure();
    for (int i = 0; i < kRounds; i++) pass.run([](int, int) { return Ahead{}; });
    V::Tiles::release();
    return int64_t(kRounds) * kRateTokens * 32 * kRateReduction * 2;
  } else {
    for (int t = 0; t < kRateTokens; t += kTileRows)
      for (int j = 0; j < kTileRows; j += V::kForwardCols)
        each_run<V::kForwardRows>(kTileRows, [&]<int R>(int r) {
          const bf16* const rows = x + t * kRateReduction + r * 32;
          float* const at = c + (t + r) * 32 + j;
          if constexpr (V::kPairs)
            forward_micro<V, R>(rows, panel + j * 32, kRateReduction / 32, at);
          else
            forward_floats<V, R>(rows, reinterpret_cast<float*>(memory) + j * kRateReduction, kRateReduction / 32, at);
        });
    return int64_t(kRateTokens) * kTileRows * kRateReduction * 2;
  }
}

}  // namespace ktft
