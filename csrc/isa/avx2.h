// AVX2 + FMA + F16C: 8 lanes.
#pragma once

#include "isa/madd_codes.h"

namespace ktft {

struct Avx2 {
  using Codes = MaddCodes<Avx2>;
  static constexpr int kWidth = 8, kStep = 8;
  static constexpr bool kPairs = false, kLooksUpWords = false;
  static constexpr int kForwardRows = 4, kForwardCols = 2, kBackwardRows = 2;
  using F = __m256;
  using In = __m256;
  struct Table {
    __m256 low, high;
  };

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float v) { return _mm256_set1_ps(v); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load(const bf16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static F load_int8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static F load_fp8(const uint8_t* p) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(short(0xbfff))));
  }
  static Table load_table(const float* values) { return {_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)}; }
  template <int kShift>
  static F lookup16(Table table, const uint8_t* p) {  // the permute uses three bits of the code, the blend the fourth
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m256i code = _mm256_srli_epi32(wide, kShift);
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, code), _mm256_permutevar8x32_ps(table.high, code),
                            _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)));
  }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static void store(bf16* p, F v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    r = _mm256_blendv_epi8(r, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  static void stream_line(void* to, const void* from) {
    for (int i = 0; i < 2; i++)
      _mm256_stream_si256(static_cast<__m256i*>(to) + i, _mm256_load_si256(static_cast<const __m256i*>(from) + i));
  }
  static void drain() { _mm_sfence(); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F sqrt(F v) { return _mm256_sqrt_ps(v); }
  static F reciprocal(F v) { return _mm256_div_ps(_mm256_set1_ps(1.f), v); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F where_equal(F a, F b, F v) { return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ), v); }
  static F round(F v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F scale_by_power(F v, F n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(v, _mm256_castsi256_ps(exponent));
  }
  static float sum(F v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }

  static In load_in(const bf16* p) { return load(p); }
  static F dot(F acc, In x, In w) { return _mm256_fmadd_ps(x, w, acc); }
};

}  // namespace ktft
