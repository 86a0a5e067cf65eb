// One lane. It runs on any CPU and is the slow reference among the ISAs.
#pragma once

#include <cmath>
#include <cstring>

#include "base/types.h"

namespace ktft {

// Every ISA struct has these members; the loops in csrc/kernels/*-inl.h use nothing else.
//   F            kWidth fp32 lanes            In   kStep bf16 inputs of dot()
//   load_fp8     E4M3 codes as 1/256 of their value, which is what their bits mean as the upper bits of half precision
//   Table        16 fp32 values; lookup16<shift>(table, p) has table[p[i] >> shift & 15] in lane i
//   div, sqrt    correctly rounded; reciprocal may be a few units off
//   max, min     the second argument if one is NaN
//   where_equal(a,b,v)  v where a == b, else 0
//   dot(a,x,w)   a + the lanes' products of x and w, in fp32; sum() adds up an F
//   even, odd    of 2 kWidth bf16; add_sums(p, a, b, c, d) adds the sums of four F to p[0..4)
//   kPairs       whether dot() multiplies pairs of bf16 (interleave_tile, zip, broadcast_pair); others widen to fp32
//   kLooksUpWords  whether look_up finds 32 bf16 values of 4-bit codes at once
//   store_exact  stores values that bf16 holds exactly
//   stream_line  copies 64 aligned bytes past the caches, for data not read soon; drain() orders such copies
//   kForwardRows x kForwardCols (4 without kPairs), kBackwardRows x 32 columns: accumulators of the two micro-kernels
//   Codes        only on ISAs with products of bytes: see isa/avx512_bf16.h
//   Tiles        only on tile ISAs, together with store_pairs and transpose_dwords: see isa/amx.h
struct Scalar {
  static constexpr int kWidth = 1, kStep = 1;
  static constexpr bool kPairs = false, kLooksUpWords = false;
  static constexpr int kForwardRows = 2, kForwardCols = 4, kBackwardRows = 1;
  using F = float;
  using In = float;
  using Table = const float*;

  static F zero() { return 0; }
  static F set1(float v) { return v; }
  static F load(const float* p) { return *p; }
  static F load(const bf16* p) { return to_float(*p); }
  static F load_int8(const int8_t* p) { return float(*p); }
  static F load_fp8(const uint8_t* p) { return half_to_float(uint16_t((*p & 0x80) << 8 | (*p & 0x7f) << 7)); }
  static Table load_table(const float* values) { return values; }
  template <int kShift>
  static F lookup16(Table table, const uint8_t* p) {
    return table[*p >> kShift & 15];
  }
  static void store(float* p, F v) { *p = v; }
  static void store(bf16* p, F v) { *p = to_bf16(v); }
  static void store_exact(bf16* p, F v) { store(p, v); }
  static F even(const bf16* p) { return to_float(p[0]); }
  static F odd(const bf16* p) { return to_float(p[1]); }
  static void stream_line(void* to, const void* from) { std::memcpy(to, from, 64); }
  static void drain() {}
  static F add(F a, F b) { return a + b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F sqrt(F v) { return std::sqrt(v); }
  static F reciprocal(F v) { return 1 / v; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F min(F a, F b) { return a < b ? a : b; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F where_equal(F a, F b, F v) { return a == b ? v : 0; }
  static F round(F v) { return std::nearbyintf(v); }
  static F scale_by_power(F v, F n) { return std::ldexp(v, int(n)); }  // v * 2^n, n whole in [-126, 127]
  static float sum(F v) { return v; }
  static void add_sums(float* p, F a, F b, F c, F d) { p[0] += a, p[1] += b, p[2] += c, p[3] += d; }

  static In load_in(const bf16* p) { return to_float(*p); }
  static F dot(F acc, In x, In w) { return acc + x * w; }
};

}  // namespace ktft
