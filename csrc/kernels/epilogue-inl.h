// The work on a GEMM's results while they are in L2: row scales, biases, the activation, its gradient, rounding to
// bf16. Results that the next phase does not read are written with non-temporal stores, since an ordinary store to a
// line that is in no cache would first wait for memory.
#pragma once

#include <algorithm>

#include "kernels/kernels.h"

namespace ktft {

template <class V>
constexpr bool kHasTiles = requires { typename V::Tiles; };

// 2^t for |t| <= 125, to about 3e-6: 2^n p(f), t = n + f, |f| <= 1/2, p the degree-5 Taylor polynomial of 2^f.
template <class V>
typename V::F power_of_two(typename V::F t) {
  const typename V::F n = V::round(t), f = V::fma(n, V::set1(-1.f), t);
  typename V::F p = V::set1(0.00133335581f);
  for (const float c : {0.00961812911f, 0.0555041087f, 0.240226507f, 0.693147181f, 1.f}) p = V::fma(p, f, V::set1(c));
  return V::scale_by_power(p, n);
}

// 1 / (1 + e^-x) to about 5e-6.
template <class V>
typename V::F sigmoid(typename V::F x) {
  const typename V::F t = V::min(V::max(V::mul(x, V::set1(-1.44269504f)), V::set1(-125.f)), V::set1(125.f));
  return V::reciprocal(V::add(V::set1(1.f), power_of_two<V>(t)));
}

// Results whose lanes are neighbouring outputs.
template <class V>
typename V::F apply(const float* value, const Affine& out) {
  const typename V::F v = V::load(value);
  if (!out.bias) return out.scale ? V::mul(v, V::load(out.scale)) : v;
  return out.scale ? V::fma(v, V::load(out.scale), V::load(out.bias)) : V::add(v, V::load(out.bias));
}

// Transposed results: all lanes belong to output k.
template <class V>
typename V::F apply_turned(const float* value, const Affine& out, int k) {
  const typename V::F v = V::load(value);
  if (!out.bias) return out.scale ? V::mul(v, V::set1(out.scale[k])) : v;
  return out.scale ? V::fma(v, V::set1(out.scale[k]), V::set1(out.bias[k])) : V::add(v, V::set1(out.bias[k]));
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

// Transposes a piece of value(k, t) after rounding: transposing pairs of bf16 is half the work of transposing fp32.
template <class V, class Value>
void narrow_turned(const Value& value, bf16* piece) {
  alignas(64) bf16 spare[kPieceElements];
  for (int k = 0; k < 32; k += 2)
    for (int t = 0; t < 16; t += V::kWidth) V::store_pairs(spare + k * 16 + 2 * t, value(k, t), value(k + 1, t));
  V::transpose_dwords(spare, 64, piece, 64);
}

template <class V>
void stream_lines(int lines, const bf16* from, bf16* to, int64_t apart) {
  for (int i = 0; i < lines; i++) V::stream_line(to + i * apart, from + i * 32);
}

template <class V>
void store_rows(Pass pass, int tokens, int cols, const float* c, const Affine& affine, bf16* y, int64_t ldy) {
  alignas(64) bf16 spare[kPieceElements];
  for (int t = 0; t < tokens; t += kTileRows)
    for (int col = 0; col < cols; col += 32) {
      const float* const piece = c + result_piece(col / 32, t / kTileRows, tokens);
      const int rows = std::min(kTileRows, tokens - t);
      bf16* const out = y + t * ldy + col;
      if constexpr (kHasTiles<V>) {
        if (pass == Pass::kForward) {
          const Affine here = affine_at(affine, col);
          narrow_turned<V>([&](int k, int t) { return apply_turned<V>(piece + k * 16 + t, here, k); }, spare);
          stream_lines<V>(rows, spare, out, ldy);
          continue;
        }
      }
      for (int i = 0; i < rows * 32; i += V::kWidth)
        V::store(spare + i, apply<V>(piece + i, affine_at(affine, col + i % 32)));
      stream_lines<V>(rows, spare, out, ldy);
    }
  V::drain();
}

// Swiglu's constants in lanes. Backward must know which values were clamped, and sees them rounded to bf16: `marked`
// moves values beyond the limit away from it, by more than 2^-5 of it, and `edge` separates them from the rest. Without
// `Cubic` the cubic term is left out.
template <class V, bool Cubic>
struct SwigluLanes {
  using F = typename V::F;
  F alpha, cubic, limit, least, edge, least_edge, gate_limit, gate_edge, shift;

  explicit SwigluLanes(const Swiglu& f)
      : alpha(V::set1(f.alpha)),
        cubic(V::set1(f.cubic)),
        limit(V::set1(f.limit)),
        least(V::set1(-f.limit)),
        edge(V::set1(f.limit * (1 + 0x1p-7f))),
        least_edge(V::set1(-f.limit * (1 + 0x1p-7f))),
        gate_limit(V::set1(f.gate_limit)),
        gate_edge(V::set1(f.gate_limit * (1 + 0x1p-7f))),
        shift(V::set1(f.shift)) {}
  F gate(F value) const { return V::min(value, gate_limit); }
  F up(F value) const { return V::max(V::min(value, limit), least); }
  static F marked(F value, F clamped) { return V::fma(V::fma(clamped, V::set1(-1.f), value), V::set1(0x1p20f), value); }
  F marked_gate(F value) const { return marked(value, gate(value)); }
  F marked_up(F value) const { return marked(value, up(value)); }
  // The gradient, or zero where the value was clamped.
  F gate_grad(F value, F grad) const { return V::where_equal(V::min(value, gate_edge), value, grad); }
  F up_grad(F value, F grad) const { return V::where_equal(V::max(V::min(value, edge), least_edge), value, grad); }
  // alpha + n cubic g^2: the sigmoid's argument over g for n = 1, its derivative by g for n = 3.
  F slope(F g, float n) const {
    if constexpr (Cubic)
      return V::fma(V::mul(cubic, V::set1(n)), V::mul(g, g), alpha);
    else
      return alpha;
  }
  F gated(F g) const { return sigmoid<V>(V::mul(slope(g, 1), g)); }
  F h(F gate_value, F up_value) const {
    const F g = gate(gate_value);
    return V::mul(V::mul(g, gated(g)), V::add(up(up_value), shift));
  }
};

// Computes one piece of h. Transposed results give transposed bf16 directly, since every operation is element-wise.
template <class V, bool Cubic>
void swiglu_turned(const SwigluLanes<V, Cubic>& f, const float* gate, const float* up, const Affine& gate_out,
                   const Affine& up_out, bf16* h, bf16* saved_gate, bf16* saved_up) {
  const auto gate_at = [&](int k, int t) { return apply_turned<V>(gate + k * 16 + t, gate_out, k); };
  const auto up_at = [&](int k, int t) { return apply_turned<V>(up + k * 16 + t, up_out, k); };
  const auto out = [&](int k, int t) { return f.h(gate_at(k, t), up_at(k, t)); };
  for (int k = 0; k < 32; k += 2)
    for (int t = 0; t < 16; t += V::kWidth) V::store_pairs(h + k * 16 + 2 * t, out(k, t), out(k + 1, t));
  if (!saved_gate) return;
  alignas(64) bf16 spare[kPieceElements];
  narrow_turned<V>([&](int k, int t) { return f.marked_gate(gate_at(k, t)); }, spare);
  stream_lines<V>(kTileRows, spare, saved_gate, 32);
  narrow_turned<V>([&](int k, int t) { return f.marked_up(up_at(k, t)); }, spare);
  stream_lines<V>(kTileRows, spare, saved_up, 32);
}

template <class V, bool Cubic>
void swiglu_rows(const SwigluLanes<V, Cubic>& f, int rows, const float* gate, const float* up, const Affine& gate_out,
                 const Affine& up_out, bf16* h, bf16* saved_gate, bf16* saved_up) {
  alignas(64) bf16 spare[2 * kPieceElements];
  for (int i = 0; i < rows * 32; i += V::kWidth) {
    const typename V::F g = apply<V>(gate + i, affine_at(gate_out, i % 32)),
                        u = apply<V>(up + i, affine_at(up_out, i % 32));
    V::store(h + i, f.h(g, u));
    if (!saved_gate) continue;
    V::store(spare + i, f.marked_gate(g));
    V::store(spare + kPieceElements + i, f.marked_up(u));
  }
  if (!saved_gate) return;
  stream_lines<V>(rows, spare, saved_gate, 32);
  stream_lines<V>(rows, spare + kPieceElements, saved_up, 32);
}

// Copies the first rows of a transposed piece to the same piece of the next strip (see kFewRows).
template <class V>
void few_rows(int tokens, const bf16* turned, bf16* rows) {
  alignas(64) bf16 spare[kPieceElements];
  V::transpose_dwords(turned, 64, spare, 64);
  std::memcpy(rows, spare, size_t(tokens) * 32 * sizeof(bf16));
}

template <class V, bool Cubic>
void swiglu_of(const SwigluArgs& a) {
  const SwigluLanes<V, Cubic> f(a.function);
  for (int t = 0; t < a.tokens; t += kTileRows)
    for (int col = 0; col < a.cols; col += 32) {
      const int64_t c = result_piece(col / 32, t / kTileRows, a.tokens);
      const int64_t out = t / kTileRows * a.strip + col * kTileRows;
      bf16* const saved_gate = a.saved_gate ? a.saved_gate + out : nullptr;
      bf16* const saved_up = a.saved_gate ? a.saved_up + out : nullptr;
      if constexpr (kHasTiles<V>) {
        swiglu_turned<V>(f, a.gate + c, a.up + c, affine_at(a.gate_out, col), affine_at(a.up_out, col), a.h + out,
                         saved_gate, saved_up);
        if (a.tokens <= kFewRows) few_rows<V>(a.tokens, a.h + out, a.h + out + a.strip);
      } else
        swiglu_rows<V>(f, std::min(kTileRows, a.tokens - t), a.gate + c, a.up + c, affine_at(a.gate_out, col),
                       affine_at(a.up_out, col), a.h + out, saved_gate, saved_up);
    }
  V::drain();
}

// max(up, 0)^2 of one piece, and up for backward.
template <class V>
void relu2_piece(const SwigluArgs& a, int rows, const float* up, const Affine& out, bf16* h, bf16* saved) {
  alignas(64) bf16 spare[kPieceElements];
  const auto square = [](typename V::F value) {
    const typename V::F u = V::max(value, V::zero());
    return V::mul(u, u);
  };
  if constexpr (kHasTiles<V>) {
    const auto at = [&](int k, int t) { return apply_turned<V>(up + k * 16 + t, out, k); };
    for (int k = 0; k < 32; k += 2)
      for (int t = 0; t < 16; t += V::kWidth)
        V::store_pairs(h + k * 16 + 2 * t, square(at(k, t)), square(at(k + 1, t)));
    if (saved) narrow_turned<V>(at, spare);
    if (a.tokens <= kFewRows) few_rows<V>(a.tokens, h, h + a.strip);
  } else {
    for (int i = 0; i < rows * 32; i += V::kWidth) {
      const typename V::F u = apply<V>(up + i, affine_at(out, i % 32));
      V::store(h + i, square(u));
      if (saved) V::store(spare + i, u);
    }
  }
  if (saved) stream_lines<V>(rows, spare, saved, 32);
}

template <class V>
void relu2(const SwigluArgs& a) {
  for (int t = 0; t < a.tokens; t += kTileRows)
    for (int col = 0; col < a.cols; col += 32) {
      const int64_t out = t / kTileRows * a.strip + col * kTileRows;
      relu2_piece<V>(a, kHasTiles<V> ? kTileRows : std::min(kTileRows, a.tokens - t),
                     a.up + result_piece(col / 32, t / kTileRows, a.tokens), affine_at(a.up_out, col), a.h + out,
                     a.saved_up ? a.saved_up + out : nullptr);
    }
  V::drain();
}

template <class V>
void swiglu(const SwigluArgs& a) {
  if (!a.function.gated) return relu2<V>(a);
  a.function.cubic ? swiglu_of<V, true>(a) : swiglu_of<V, false>(a);
}

template <class V, bool Cubic>
void swiglu_backward_of(const SwigluBackwardArgs& a) {
  using F = typename V::F;
  const F one = V::set1(1.f), minus = V::set1(-1.f);
  const SwigluLanes<V, Cubic> f(a.function);
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
          const F g = f.gate(gate), u = V::add(f.up(up), f.shift), s = f.gated(g);
          const F glu = V::mul(g, s), h = V::mul(glu, u);
          dot[r] = V::fma(grad, h, dot[r]);
          const F weighted = V::mul(grad, weight);
          // (g sigmoid(z))' = s + z' g s (1 - s)
          const F slope = V::fma(V::mul(f.slope(g, 3), glu), V::fma(s, minus, one), s);
          F dgate = f.gate_grad(gate, V::mul(V::mul(weighted, u), slope)), dup = f.up_grad(up, V::mul(weighted, glu));
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

template <class V>
void relu2_backward(const SwigluBackwardArgs& a) {
  using F = typename V::F;
  const F two = V::set1(2.f);
  for (int t = 0; t < pad_rows(a.tokens); t += kTileRows) {
    const int rows = std::clamp(a.tokens - t, 0, kTileRows);
    F dot[kTileRows];
    for (int col = 0; col < a.cols; col += 32) {
      if (col % kDotCols == 0)
        for (F& sum : dot) sum = V::zero();
      const float* const dh = a.dh + result_piece(col / 32, t / kTileRows, a.tokens);
      const int64_t out = t / kTileRows * a.strip + col * kTileRows;
      for (int r = 0; r < rows; r++) {
        const F weight = V::mul(V::set1(a.weights[t + r]), two);
        for (int j = 0; j < 32; j += V::kWidth) {
          const int64_t at = out + r * 32 + j;
          const F u = V::max(V::load(a.up + at), V::zero()), grad = V::load(dh + r * 32 + j), h = V::mul(u, u);
          dot[r] = V::fma(grad, h, dot[r]);
          F dup = V::mul(V::mul(grad, weight), u);
          if (a.up_scale) dup = V::mul(dup, V::load(a.up_scale + col + j));
          V::store(a.dup + at, dup);
          if (a.h) V::store(a.h + at, h);
        }
      }
      for (bf16* piece : {a.dup, a.h})
        if (piece) std::memset(piece + out + rows * 32, 0, size_t(kTileRows - rows) * 32 * sizeof(bf16));
      float* const sums = a.weight_grads + col / kDotCols * a.weight_grads_stride + t;
      for (int r = 0; r < rows; r++) sums[r] = V::sum(dot[r]);
    }
  }
}

template <class V>
void swiglu_backward(const SwigluBackwardArgs& a) {
  if (!a.function.gated) return relu2_backward<V>(a);
  a.function.cubic ? swiglu_backward_of<V, true>(a) : swiglu_backward_of<V, false>(a);
}

}  // namespace ktft
