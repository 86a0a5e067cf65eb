// AVX-512-BF16: vdpbf16ps multiplies 32 bf16 and adds neighbouring products into 16 fp32 lanes. CPUs that have it have
// AVX-512-VNNI, which does the same with 64 bytes and int32, and all but Intel's Cooper Lake have AVX-512-VBMI, which
// looks up bytes by six bits. Cooper Lake runs the kernels for plain AVX-512.
#pragma once

#include "isa/avx512.h"

namespace ktft {

// Products of codes with integers: 4-bit codes, two in a byte, or int8. Values are held with kOffset added to them.
//   table                    from 16 bytes, four times, each of which is a value + 128
//   low_values, high_values  byte i is table[codes[i] & 15], table[codes[i] >> 4]
//   values                   byte i is codes[i], for signed codes
//   dot                      int32 lane i is sums[i] + the products of bytes 4i to 4i + 3, of values and signed x
//   dot_low                  the same, for 0 <= x < 128
//   add_scaled               sums[i] += scales[i / 4] * lane i, all 16; add_scaled_lanes has a scale for each lane
// and where there are registers for the sums of a strip:
//   plus_scaled_lanes        add_scaled_lanes with sums in a register
//   sum_fours                lane 4 g + k is the sum of lanes 4 g to 4 g + 3 of the k-th of four
//   sum_groups               out[k] is the sum of lanes 4 g + k over all g
//   by_fours                 lane 4 g + k is value g, or 4 k + g if there is one for each row
//   largest_magnitude        of 32 values of x, the bits of the largest magnitude; NaN is larger than Inf
//   split                    round(x * factor) = 128 high + low, of 16 values, 0 <= low < 128
//   round                    round(x * factor), of 16 values
//   pair_weights             words that dot and dot_low multiply pairs of products by: integers[i / 4] for lane i
// and for the GEMM, whose lanes are outputs (kernels/byte_gemm-inl.h):
//   kOutputs, kInputRows     lanes of a vector of Outputs; rows of X whose sums for 32 outputs stay in registers
//   round_group              32 values of X as Inputs, four in each; returns what sums of their products begin with
//   add_products             sums[i] + W's four bytes of lane i times the four of x
//   all_outputs, to_float    the same value in all lanes; lanes as floats
//   columns_of_four          out[apart g + r] = in[4 r + g]
struct VnniCodes {
  static constexpr int kOffset = 128, kOutputs = 16, kInputRows = 6;
  using Bytes = __m512i;
  using Sums = __m512;

  static Bytes load(const void* p) { return _mm512_loadu_si512(p); }
  static void store(void* p, Bytes v) { _mm512_storeu_si512(p, v); }
  static Bytes table(const uint8_t* values) { return load(values); }
  // In a table of four copies, bits above a code do not matter
  static Bytes low_values(Bytes table, Bytes codes) { return _mm512_permutexvar_epi8(codes, table); }
  static Bytes high_values(Bytes table, Bytes codes) { return low_values(table, _mm512_srli_epi16(codes, 4)); }
  static Bytes values(Bytes codes) { return _mm512_xor_si512(codes, _mm512_set1_epi8(-128)); }
  static Bytes dot(Bytes sums, Bytes values, Bytes x) { return _mm512_dpbusd_epi32(sums, values, x); }
  static Bytes dot_low(Bytes sums, Bytes values, Bytes x) { return dot(sums, values, x); }
  static Bytes times_128(Bytes lanes) { return _mm512_slli_epi32(lanes, 7); }
  static Sums plus_scaled_lanes(Sums sums, Bytes lanes, const float* scales) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(lanes), _mm512_load_ps(scales), sums);
  }
  static void add_scaled(float* sums, Bytes lanes, const float* scales) {
    const __m512i groups = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512 scale = _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_load_ps(scales)), groups);
    _mm512_store_ps(sums, _mm512_fmadd_ps(_mm512_cvtepi32_ps(lanes), scale, _mm512_load_ps(sums)));
  }
  static Bytes sum_fours(Bytes a, Bytes b, Bytes c, Bytes d) {
    const Bytes first = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const Bytes second = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
  }
  static void sum_groups(Sums v, float* out) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    _mm_store_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }
  static Sums by_fours(const float* values, bool of_row) {
    const __m512i groups = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512i rows = _mm512_set_epi32(12, 8, 4, 0, 12, 8, 4, 0, 12, 8, 4, 0, 12, 8, 4, 0);
    return _mm512_permutexvar_ps(of_row ? _mm512_add_epi32(groups, rows) : groups, _mm512_load_ps(values));
  }
  using Outputs = __m512i;
  using Inputs = int32_t;
  static Outputs all_outputs(int32_t value) { return _mm512_set1_epi32(value); }
  static Outputs load_outputs(const void* p) { return _mm512_loadu_si512(p); }
  static Outputs add_products(Outputs sums, Outputs values, Inputs x) { return dot(sums, values, all_outputs(x)); }
  static int32_t round_group(const bf16* x, float factor, Inputs* out) {
    const __m512i first = whole(x, factor), second = whole(x + 16, factor);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(first));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 4), _mm512_cvtepi32_epi8(second));
    return -kOffset * _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
  }
  static void columns_of_four(const float* in, float* out, int apart) {
    const __m512i rows = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 28, 24, 20, 16, 12, 8, 4, 0);
    for (int g = 0; g < 4; g++, out += apart) {
      const __m512i of = _mm512_add_epi32(rows, _mm512_set1_epi32(g));
      const __m512 low = _mm512_permutex2var_ps(_mm512_load_ps(in), of, _mm512_load_ps(in + 16));
      const __m512 high = _mm512_permutex2var_ps(_mm512_load_ps(in + 32), of, _mm512_load_ps(in + 48));
      _mm512_store_ps(out, _mm512_shuffle_f32x4(low, high, 0x44));
    }
  }
  static Sums to_float(Bytes lanes) { return _mm512_cvtepi32_ps(lanes); }
  static void add_scaled_lanes(float* sums, Bytes lanes, const float* scales) {
    _mm512_store_ps(sums, plus_scaled_lanes(_mm512_load_ps(sums), lanes, scales));
  }
  static int largest_magnitude(const bf16* x) {
    const __m512i all = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return 0xffff - _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))), 0);
  }
  static Bytes whole(const bf16* x, float factor) {
    return _mm512_cvtps_epi32(_mm512_mul_ps(Avx512::load(x), _mm512_set1_ps(factor)));
  }
  static void round(const bf16* x, float factor, int8_t* out) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(whole(x, factor)));
  }
  static void split(const bf16* x, float factor, int8_t* high, int8_t* low) {
    const __m512i whole = VnniCodes::whole(x, factor);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(_mm512_srai_epi32(whole, 7)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low),
                     _mm512_cvtepi32_epi8(_mm512_and_si512(whole, _mm512_set1_epi32(127))));
  }
};

struct Avx512Bf16 : Avx512 {
  using Codes = VnniCodes;
  static constexpr int kStep = 32;
  static constexpr bool kPairs = true;
  using In = __m512bh;

  using Avx512::store;
  static void store(bf16* p, F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
  }

  static In load_in(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static F dot(F acc, In x, In w) { return _mm512_dpbf16_ps(acc, x, w); }
  static In to_pairs(const int8_t* p) { return _mm512_cvtne2ps_pbh(load_int8(p + 16), load_int8(p)); }

  // Row-major 16 x 32 tile -> rows 2p and 2p+1 interleaved: 32 pairs for columns 0-15, then for 16-31.
  static void interleave_tile(const bf16* tile, bf16* out) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int r = 0; r < 16; r += 2) {
      const __m512i even = _mm512_loadu_si512(tile + r * 32), odd = _mm512_loadu_si512(tile + r * 32 + 32);
      _mm512_storeu_si512(out + r * 32, _mm512_permutex2var_epi16(even, low, odd));
      _mm512_storeu_si512(out + r * 32 + 32, _mm512_permutex2var_epi16(even, high, odd));
    }
  }
  // out[j][i] = in[i][j] for 16 x 16 dwords: fp32 values, or pairs of bf16.
  static void transpose_dwords(const void* in, int64_t in_bytes, void* out_at, int64_t out_bytes) {
    const char* const rows = static_cast<const char*>(in);
    char* const out = static_cast<char*>(out_at);
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(rows + i * in_bytes);
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
      r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
      r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
      r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int c = 0; c < 4; c++) {  // r[4 g + c] holds, in 128-bit lane l, column 4 l + c of rows 4 g to 4 g + 3
      const __m512i low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), high = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
      const __m512i low2 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
      const __m512i high2 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
      _mm512_storeu_si512(out + c * out_bytes, _mm512_shuffle_i32x4(low, low2, 0x88));
      _mm512_storeu_si512(out + (4 + c) * out_bytes, _mm512_shuffle_i32x4(high, high2, 0x88));
      _mm512_storeu_si512(out + (8 + c) * out_bytes, _mm512_shuffle_i32x4(low, low2, 0xdd));
      _mm512_storeu_si512(out + (12 + c) * out_bytes, _mm512_shuffle_i32x4(high, high2, 0xdd));
    }
  }

  // Pairs of the first 16 values of both.
  static In zip(const bf16* first, const bf16* second) {
    const __m512i turns = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                           37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second));
    return (__m512bh)_mm512_permutex2var_epi16(_mm512_castsi256_si512(a), turns, _mm512_castsi256_si512(b));
  }
  static In broadcast_pair(const bf16* p) {
    int pair;
    __builtin_memcpy(&pair, p, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
};

}  // namespace ktft
