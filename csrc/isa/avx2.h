// AVX2 + FMA + F16C: 8 lanes.
#pragma once

#include "isa/madd_codes.h"

namespace ktft {

struct Avx2 {
  using Codes = MaddCodes<Avx2>;
  static constexpr int kWidth = 8, kStep = 8;
  static constexpr bool kPairs = false, kLooksUpWords = true;
  static constexpr int kForwardRows = 2, kForwardCols = 4, kBackwardRows = 3;
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
  static F even(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16));
  }
  static F odd(const bf16* p) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000))));
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
  static void store_exact(bf16* p, F v) {
    const __m256i upper = _mm256_srli_epi32(_mm256_castps_si256(v), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  // out[i] = values[codes[i] & 15], out[16 + i] = values[codes[i] >> 4]. Lower and upper bytes are looked up apart.
  template <class Word>
  static void look_up(const Word* values, const uint8_t* codes, Word* out) {
    const __m256i apart = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,  //
                                           0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    const __m256i table = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(table, apart), 0xd8);
    const __m256i lower = _mm256_permute2x128_si256(bytes, bytes, 0x00);
    const __m256i upper = _mm256_permute2x128_si256(bytes, bytes, 0x11);
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const __m256i index = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(both, 4), both), _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(lower, index), high = _mm256_shuffle_epi8(upper, index);
    const __m256i first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute2x128_si256(first, second, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16), _mm256_permute2x128_si256(first, second, 0x31));
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
  static void add_sums(float* p, F a, F b, F c, F d) {
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    _mm_storeu_ps(p, _mm_add_ps(_mm_loadu_ps(p), sums));
  }

  // out[j][i] = in[i][j] for 16 x 16 dwords, 8 x 8 at a time.
  static void transpose_dwords(const void* in, int64_t in_bytes, void* out_at, int64_t out_bytes) {
    for (int block = 0; block < 4; block++) {
      const char* const from = static_cast<const char*>(in) + block / 2 * 8 * in_bytes + block % 2 * 32;
      char* const to = static_cast<char*>(out_at) + block % 2 * 8 * out_bytes + block / 2 * 32;
      __m256i r[8], t[8];
      for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * in_bytes));
      for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
      }
      for (int i = 0; i < 8; i += 4)
        for (int k = 0; k < 2; k++) {
          r[i + 2 * k] = _mm256_unpacklo_epi64(t[i + k], t[i + 2 + k]);
          r[i + 2 * k + 1] = _mm256_unpackhi_epi64(t[i + k], t[i + 2 + k]);
        }
      for (int c = 0; c < 4; c++) {  // r[4 g + c] holds, in 128-bit lane l, column 4 l + c of rows 4 g to 4 g + 3
        const auto at = [&](int column) { return reinterpret_cast<__m256i*>(to + column * out_bytes); };
        _mm256_storeu_si256(at(c), _mm256_permute2x128_si256(r[c], r[4 + c], 0x20));
        _mm256_storeu_si256(at(4 + c), _mm256_permute2x128_si256(r[c], r[4 + c], 0x31));
      }
    }
  }

  // Products of 16-bit integers (kernels/word_gemm-inl.h). A lane has two of them, and their sum.
  struct Words {
    static constexpr int kInputRows = 2;
    using Lanes = __m256i;
    static Lanes zero() { return _mm256_setzero_si256(); }
    static Lanes in_all_lanes(int32_t two) { return _mm256_set1_epi32(two); }
    static Lanes load(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static Lanes dot(Lanes sums, Lanes x, Lanes w) { return _mm256_add_epi32(sums, _mm256_madd_epi16(x, w)); }
    static F to_float(Lanes sums) { return _mm256_cvtepi32_ps(sums); }
    static void widen(const int8_t* codes, int16_t* out) {  // 32 of them
      for (int i = 0; i < 2; i++)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + i,
                            _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * i))));
    }
    static void fix(const bf16* x, float factor, int16_t* out) {  // rounds 32 values times the factor
      const F by = _mm256_set1_ps(factor);
      for (int i = 0; i < 32; i += 16) {
        const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(even(x + i), by));
        const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(odd(x + i), by));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                            _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa));
      }
    }
  };

  static In load_in(const bf16* p) { return load(p); }
  static F dot(F acc, In x, In w) { return _mm256_fmadd_ps(x, w, acc); }
};

}  // namespace ktft
