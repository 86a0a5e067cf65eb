// AVX-512 (F, BW, DQ, VL): 16 lanes.
#pragma once

#include "isa/madd_codes.h"

namespace ktft {

struct Avx512 {
  using Codes = MaddCodes<Avx512>;
  static constexpr int kWidth = 16, kStep = 16;
  static constexpr bool kPairs = false, kLooksUpWords = true;
  static constexpr int kForwardRows = 6, kForwardCols = 4, kBackwardRows = 8;
  using F = __m512;
  using In = __m512;
  using Table = __m512;

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float v) { return _mm512_set1_ps(v); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const bf16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static F even(const bf16* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
  static F odd(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000))));
  }
  static F load_int8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static F load_fp8(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(short(0xbfff))));
  }
  static Table load_table(const float* values) { return _mm512_loadu_ps(values); }
  template <int kShift>
  static F lookup16(Table table, const uint8_t* p) {  // the permute uses the lowest four bits
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_permutexvar_ps(_mm512_srli_epi32(wide, kShift), table);
  }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static void store(bf16* p, F v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i even = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i r = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), even, quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
  }
  static void store_exact(bf16* p, F v) {
    const __m512i upper = _mm512_srli_epi32(_mm512_castps_si512(v), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(upper));
  }
  // out[i] = values[codes[i] & 15], out[16 + i] = values[codes[i] >> 4]; `values` are 16 values, repeated twice.
  template <class Word>
  static void look_up(const Word* values, const uint8_t* codes, Word* out) {
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m512i shift = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    const __m512i index = _mm512_srlv_epi16(_mm512_cvtepu8_epi16(twice), shift);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, _mm512_loadu_si512(values)));
  }
  static void stream_line(void* to, const void* from) {
    _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_load_si512(from));
  }
  static void drain() { _mm_sfence(); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F sqrt(F v) { return _mm512_sqrt_ps(v); }
  static F reciprocal(F v) {  // one step of Newton's method from 14 bits
    const F r = _mm512_rcp14_ps(v);
    return _mm512_mul_ps(r, _mm512_fnmadd_ps(v, r, _mm512_set1_ps(2.f)));
  }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F where_equal(F a, F b, F v) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), v); }
  static F round(F v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F scale_by_power(F v, F n) { return _mm512_scalef_ps(v, n); }
  static float sum(F v) { return _mm512_reduce_add_ps(v); }
  static void add_sums(float* p, F a, F b, F c, F d) {
    const __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));  // a and b in turns
    const __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    _mm_storeu_ps(p, _mm_add_ps(_mm_loadu_ps(p), sums));
  }

  static In load_in(const bf16* p) { return load(p); }
  static F dot(F acc, In x, In w) { return _mm512_fmadd_ps(x, w, acc); }
};

}  // namespace ktft
