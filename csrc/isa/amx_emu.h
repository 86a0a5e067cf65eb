// AMX's tile registers and VNNI's products in plain C++, so that tests can run their code on any CPU.
#pragma once

#include <algorithm>
#include <cmath>

#include "isa/scalar.h"

namespace ktft {

struct EmulatedTiles {
  static constexpr int kRowBytes = 64;
  using Register = uint8_t[16][kRowBytes];
  static inline thread_local Register registers[8];

  static void configure() {}
  static void release() {}

  template <int T>
  static void zero() {
    std::memset(registers[T], 0, sizeof(Register));
  }
  template <int T>
  static void load(const void* at, int64_t row_bytes) {
    for (int r = 0; r < 16; r++) std::memcpy(registers[T][r], static_cast<const char*>(at) + r * row_bytes, kRowBytes);
  }
  template <int T>
  static void stream(const void* at, int64_t row_bytes) {
    load<T>(at, row_bytes);
  }
  template <int T>
  static void store(void* at, int64_t row_bytes) {
    for (int r = 0; r < 16; r++) std::memcpy(static_cast<char*>(at) + r * row_bytes, registers[T][r], kRowBytes);
  }

  // As Intel defines it: even and odd products are summed separately, the sums are added, then C; subnormals are zero.
  // A product of two bf16 is exact in fp32, so it and its sum need no fused operation, which is a call on plain x86-64.
  template <int C, int A, int B>
  static void dot() {
    alignas(16) float a[16][32], b[16][32];
    widen(A, a);
    widen(B, b);
    for (int m = 0; m < 16; m++) {
      alignas(16) float sum[32], acc[16];
      Lanes sums[8] = {};
      for (int k = 0; k < 16; k++) {
        const Lanes even_odd = {a[m][2 * k], a[m][2 * k + 1], a[m][2 * k], a[m][2 * k + 1]};
        for (int i = 0; i < 8; i++) sums[i] = flush(sums[i] + even_odd * reinterpret_cast<const Lanes*>(b[k])[i]);
      }
      std::memcpy(sum, sums, sizeof sum);
      std::memcpy(acc, registers[C][m], sizeof acc);
      for (int n = 0; n < 16; n += 4) {
        const float* const pair = sum + 2 * n;
        const Lanes even = {pair[0], pair[2], pair[4], pair[6]}, odd = {pair[1], pair[3], pair[5], pair[7]};
        Lanes& total = *reinterpret_cast<Lanes*>(acc + n);
        total = flush(flush(total) + flush(even + odd));
      }
      std::memcpy(registers[C][m], acc, sizeof acc);
    }
  }

  template <int C, int A, int B>
  static void dot_int8() {
    int16_t b[16][4][16];
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 16; n++)
        for (int i = 0; i < 4; i++) b[k][i][n] = int8_t(registers[B][k][4 * n + i]);
    for (int m = 0; m < 16; m++) {
      int32_t acc[16];
      std::memcpy(acc, registers[C][m], sizeof acc);
      for (int k = 0; k < 16; k++)
        for (int i = 0; i < 4; i++) {
          const int16_t a = int8_t(registers[A][m][4 * k + i]);
          for (int n = 0; n < 16; n++) acc[n] += int16_t(a * b[k][i][n]);
        }
      std::memcpy(registers[C][m], acc, sizeof acc);
    }
  }

 private:
  // As wide as registers of any x86-64 are: wider ones GCC would take apart
  using Lanes = float __attribute__((vector_size(16), may_alias));
  using Bits = int32_t __attribute__((vector_size(16)));

  static Lanes flush(Lanes v) {
    constexpr float kSmallest = 1.17549435e-38f;
    const Bits subnormal = (v > -kSmallest) & (v < kSmallest);
    return (Lanes)((Bits)v & (~subnormal | INT32_MIN));
  }
  static void widen(int tile, float (*out)[32]) {
    for (int r = 0; r < 16; r++) {
      bf16 values[32];
      std::memcpy(values, registers[tile][r], sizeof values);
      for (int i = 0; i < 32; i++) out[r][i] = to_float(values[i]);
      for (int i = 0; i < 32; i += 4) {
        Lanes& lanes = *reinterpret_cast<Lanes*>(out[r] + i);
        lanes = flush(lanes);
      }
    }
  }
};

struct EmulatedCodes {
  static constexpr int kOffset = 128;
  struct Bytes {
    int32_t lanes[16];

    uint8_t& at(int i) { return reinterpret_cast<uint8_t*>(lanes)[i]; }
    uint8_t at(int i) const { return reinterpret_cast<const uint8_t*>(lanes)[i]; }
  };

  static Bytes load(const void* p) {
    Bytes v;
    std::memcpy(v.lanes, p, sizeof v.lanes);
    return v;
  }
  static void store(void* p, const Bytes& v) { std::memcpy(p, v.lanes, sizeof v.lanes); }
  static Bytes table(const uint8_t* values) { return load(values); }
  static Bytes low_values(const Bytes& table, Bytes codes) {
    for (int i = 0; i < 64; i++) codes.at(i) = table.at(codes.at(i) & 15);
    return codes;
  }
  static Bytes high_values(const Bytes& table, Bytes codes) {
    for (int i = 0; i < 64; i++) codes.at(i) = table.at(codes.at(i) >> 4);
    return codes;
  }
  static Bytes values(Bytes codes) {
    for (int i = 0; i < 64; i++) codes.at(i) ^= 128;
    return codes;
  }
  static Bytes dot(Bytes sums, const Bytes& u, const Bytes& s) {
    for (int i = 0; i < 64; i++) sums.lanes[i / 4] += u.at(i) * int8_t(s.at(i));
    return sums;
  }
  static Bytes dot_low(Bytes sums, const Bytes& u, const Bytes& s) { return dot(sums, u, s); }
  static Bytes times_128(Bytes lanes) {
    for (int32_t& lane : lanes.lanes) lane *= 128;
    return lanes;
  }
  static void add_scaled(float* sums, const Bytes& lanes, const float* scales) {
    for (int i = 0; i < 16; i++) sums[i] += scales[i / 4] * float(lanes.lanes[i]);
  }
  static void add_scaled_lanes(float* sums, const Bytes& lanes, const float* scales) {
    for (int i = 0; i < 16; i++) sums[i] += scales[i] * float(lanes.lanes[i]);
  }
  static int largest_magnitude(const bf16* x) {
    int largest = 0;
    for (int i = 0; i < 32; i++) largest = std::max(largest, x[i].bits & 0x7fff);
    return largest;
  }
  static void round(const bf16* x, float factor, int8_t* out) {
    for (int i = 0; i < 16; i++) out[i] = int8_t(std::nearbyint(to_float(x[i]) * factor));
  }
  static void split(const bf16* x, float factor, int8_t* high, int8_t* low) {
    for (int i = 0; i < 16; i++) {
      const int whole = int(std::nearbyint(to_float(x[i]) * factor));
      high[i] = int8_t(whole >> 7);
      low[i] = int8_t(whole & 127);
    }
  }
};

struct AmxEmu : Scalar {
  using Codes = EmulatedCodes;
  using Tiles = EmulatedTiles;

  static void store_pairs(bf16* p, F even, F odd) {
    p[0] = to_bf16(even);
    p[1] = to_bf16(odd);
  }

  static F load_int32(const void* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return float(v);
  }
  static void largest_of_pairs(const bf16* pairs, int rows, float* largest) {
    uint16_t most[16] = {};
    for (int i = 0; i < rows * 32; i++) {
      const uint16_t magnitude = pairs[i].bits & 0x7fff;
      if (magnitude > most[i % 32 / 2]) most[i % 32 / 2] = magnitude;
    }
    for (int t = 0; t < 16; t++) largest[t] = to_float(bf16{most[t]});
  }
  static void store_codes(int8_t* out, const bf16* low, const bf16* high, const float* factors) {
    for (int t = 0; t < 16; t++) {
      const bf16 values[4] = {low[2 * t], low[2 * t + 1], high[2 * t], high[2 * t + 1]};
      for (int i = 0; i < 4; i++) {
        const float v = to_float(values[i]) * factors[t];
        out[4 * t + i] = v == v ? int8_t(std::lrintf(v)) : 0;
      }
    }
  }

  static void transpose_dwords(const void* in, int64_t in_bytes, void* out, int64_t out_bytes) {
    for (int i = 0; i < 16; i++)
      for (int j = 0; j < 16; j++)
        std::memcpy(static_cast<char*>(out) + j * out_bytes + i * 4,
                    static_cast<const char*>(in) + i * in_bytes + j * 4, 4);
  }
  static void interleave_tile(const bf16* tile, bf16* out) {
    for (int pair = 0; pair < 8; pair++)
      for (int c = 0; c < 32; c++) {
        out[pair * 64 + c * 2] = tile[pair * 64 + c];
        out[pair * 64 + c * 2 + 1] = tile[pair * 64 + 32 + c];
      }
  }
};

}  // namespace ktft
