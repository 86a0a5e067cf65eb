// What happens to a GEMM's results while they are in L2: row scales, SiLU and its gradient, rounding to bf16.
//
// What the next phase does not read is streamed: a store to a line that no cache holds would wait for memory first.
#pragma once

#include <algorithm>

#include "kernels/kernels.h"
#include "kernels/math-inl.h"

namespace ktft {

template <class V>
constexpr bool kHasTiles = requires { typename V::Tiles; };

template <class V>
typename V::F scaled(const float* value, const float* scale) {
  return scale ? V::mul(V::load(value), V::load(scale)) : V::load(value);
}

template <class V>
void unturn(int pieces, float* c) {
  if constexpr (kHasTiles<V>) {
    alignas(64) float spare[kResultPiece];
    for (int i = 0; i < pieces; i++, c += kResultPiece) {
      V::transpose_dwords(c, 64, spare, 128);
      V::transpose_dwords(c + 256, 64, spare + 16, 128);
      std::memcpy(c, spare, sizeof spare);
    }
  }
}

// A turned piece in bf16, times the scales of its outputs: turning pairs of bf16 is half the work of turning fp32.
template <class V>
void narrow_turned(const float* c, const float* scale, bf16* piece) {
  alignas(64) bf16 spare[kPieceElements];
  const auto value = [&](int k, int t) {
    const typename V::F v = V::load(c + k * 16 + t);
    return scale ? V::mul(v, V::set1(scale[k])) : v;
  };
  for (int k = 0; k < 32; k += 2)
    for (int t = 0; t < 16; t += V::kWidth) V::store_pairs(spare + k * 16 + 2 * t, value(k, t), value(k + 1, t));
  V::transpose_dwords(spare, 64, piece, 64);
}

template <class V>
void stream_lines(int lines, const bf16* from, bf16* to, int64_t apart) {
  for (int i = 0; i < lines; i++) V::stream_line(to + i * apart, from + i * 32);
}

template <class V>
void store_rows(Pass pass, int tokens, int cols, const float* c, const float* scale, bf16* y, int64_t ldy) {
  alignas(64) bf16 spare[kPieceElements];
  for (int t = 0; t < tokens; t += kTileRows)
    for (int col = 0; col < cols; col += 32) {
      const float* const piece = c + result_piece(col / 32, t / kTileRows, tokens);
      const int rows = std::min(kTileRows, tokens - t);
      bf16* const out = y + t * ldy + col;
      if constexpr (kHasTiles<V>) {
        if (pass == Pass::kForward) {
          narrow_turned<V>(piece, scale ? scale + col : nullptr, spare);
          stream_lines<V>(rows, spare, out, ldy);
          continue;
        }
      }
      for (int i = 0; i < rows * 32; i += V::kWidth)
        V::store(spare + i, scaled<V>(piece + i, scale ? scale + col + i % 32 : nullptr));
      stream_lines<V>(rows, spare, out, ldy);
    }
  V::drain();
}

template <class V>
typename V::F silu_times(typename V::F gate, typename V::F up) {
  return V::mul(V::mul(gate, sigmoid<V>(gate)), up);
}

// One piece of h: turned results give turned bf16 without a transpose, since everything is element by element.
template <class V>
void swiglu_turned(const float* gate, const float* up, const float* gate_scale, const float* up_scale, bf16* h,
                   bf16* saved_gate, bf16* saved_up) {
  const auto value = [](const float* at, const float* scale, int i) {
    return scale ? V::mul(V::load(at), V::set1(scale[i])) : V::load(at);
  };
  const auto out = [&](int k, int t) {
    return silu_times<V>(value(gate + k * 16 + t, gate_scale, k), value(up + k * 16 + t, up_scale, k));
  };
  for (int k = 0; k < 32; k += 2)
    for (int t = 0; t < 16; t += V::kWidth) V::store_pairs(h + k * 16 + 2 * t, out(k, t), out(k + 1, t));
  if (!saved_gate) return;
  alignas(64) bf16 spare[kPieceElements];
  narrow_turned<V>(gate, gate_scale, spare);
  stream_lines<V>(kTileRows, spare, saved_gate, 32);
  narrow_turned<V>(up, up_scale, spare);
  stream_lines<V>(kTileRows, spare, saved_up, 32);
}

template <class V>
void swiglu_rows(int rows, const float* gate, const float* up, const float* gate_scale, const float* up_scale, bf16* h,
                 bf16* saved_gate, bf16* saved_up) {
  alignas(64) bf16 spare[2 * kPieceElements];
  for (int i = 0; i < rows * 32; i += V::kWidth) {
    const typename V::F g = scaled<V>(gate + i, gate_scale ? gate_scale + i % 32 : nullptr);
    const typename V::F u = scaled<V>(up + i, up_scale ? up_scale + i % 32 : nullptr);
    V::store(h + i, silu_times<V>(g, u));
    if (!saved_gate) continue;
    V::store(spare + i, g);
    V::store(spare + kPieceElements + i, u);
  }
  if (!saved_gate) return;
  stream_lines<V>(rows, spare, saved_gate, 32);
  stream_lines<V>(rows, spare + kPieceElements, saved_up, 32);
}

template <class V>
void swiglu(const SwigluArgs& a) {
  for (int t = 0; t < a.tokens; t += kTileRows)
    for (int col = 0; col < a.cols; col += 32) {
      const int64_t c = result_piece(col / 32, t / kTileRows, a.tokens);
      const int64_t out = t / kTileRows * a.strip + col * kTileRows;
      const float* const gate_scale = a.gate_scale ? a.gate_scale + col : nullptr;
      const float* const up_scale = a.up_scale ? a.up_scale + col : nullptr;
      bf16* const saved_gate = a.saved_gate ? a.saved_gate + out : nullptr;
      bf16* const saved_up = a.saved_gate ? a.saved_up + out : nullptr;
      if constexpr (kHasTiles<V>)
        swiglu_turned<V>(a.gate + c, a.up + c, gate_scale, up_scale, a.h + out, saved_gate, saved_up);
      else
        swiglu_rows<V>(std::min(kTileRows, a.tokens - t), a.gate + c, a.up + c, gate_scale, up_scale, a.h + out,
                       saved_gate, saved_up);
    }
  V::drain();
}

template <class V>
void swiglu_backward(const SwigluBackwardArgs& a) {
  using F = typename V::F;
  const F one = V::set1(1.f), minus = V::set1(-1.f);
  for (int t = 0; t < pad_rows(a.tokens); t += kTileRows) {
    const int rows = std::clamp(a.tokens - t, 0, kTileRows);
    F dot[kTileRows];
    for (int col = 0; col < a.cols; col += 32) {
      if (col % kDotCols == 0)
        for (F& sum : dot) sum = V::zero();
      const float* const dh = a.dh + result_piece(col / 32, t / kTileRows, a.tokens);
      const int64_t out = t / kTileRows * a.strip + col * kTileRows;
      for (int r = 0; r < rows; r++) {
        const F weight = V::set1(a.weights[t + r]);
        for (int j = 0; j < 32; j += V::kWidth) {
          const int64_t at = out + r * 32 + j;
          const F gate = V::load(a.gate + at), up = V::load(a.up + at), grad = V::load(dh + r * 32 + j);
          const F s = sigmoid<V>(gate), silu = V::mul(gate, s), h = V::mul(silu, up);
          dot[r] = V::fma(grad, h, dot[r]);
          const F weighted = V::mul(grad, weight);
          // SiLU'(g) = s + g s (1 - s)
          const F slope = V::fma(silu, V::fma(s, minus, one), s);
          F dgate = V::mul(V::mul(weighted, up), slope), dup = V::mul(weighted, silu);
          if (a.gate_scale) {
            dgate = V::mul(dgate, V::load(a.gate_scale + col + j));
            dup = V::mul(dup, V::load(a.up_scale + col + j));
          }
          V::store(a.dgate + at, dgate);
          V::store(a.dup + at, dup);
          if (a.h) V::store(a.h + at, h);
        }
      }
      for (bf16* piece : {a.dgate, a.dup, a.h})
        if (piece) std::memset(piece + out + rows * 32, 0, size_t(kTileRows - rows) * 32 * sizeof(bf16));
      float* const sums = a.weight_grads + col / kDotCols * a.weight_grads_stride + t;
      for (int r = 0; r < rows; r++) sums[r] = V::sum(dot[r]);
    }
  }
}

}  // namespace ktft
