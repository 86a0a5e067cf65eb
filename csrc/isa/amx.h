// AMX-BF16 tile registers over AVX-512-BF16 vectors.
#pragma once

#include "isa/avx512_bf16.h"

namespace ktft {

// Tiles 0-3 are accumulators (16 x 16 fp32), 4-7 operands (16 rows x 64 bytes).
//   dot<C, A, B>: C[m, n] += sum_k A[m, 2k] B[k, 2n] + A[m, 2k + 1] B[k, 2n + 1]     (TDPBF16PS)
//   dot_int8: the same on int8, four at a time, C int32                              (TDPBSSD)
// Inline assembly, because GCC's tile intrinsics lack the memory clobber and may be moved past the stores they read.
struct AmxTiles {
  static void configure() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }
  static void release() { __asm__ volatile("tilerelease" ::); }

  template <int T>
  static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  static void load(const void* at, int64_t row_bytes) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(row_bytes), "i"(T) : "memory");
  }
  template <int T>
  static void stream(const void* at, int64_t row_bytes) {  // for data that should not stay in L1
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(row_bytes), "i"(T) : "memory");
  }
  template <int T>
  static void store(void* at, int64_t row_bytes) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(at), "r"(row_bytes), "i"(T) : "memory");
  }
  template <int C, int A, int B>
  static void dot() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  template <int C, int A, int B>
  static void dot_int8() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

struct AmxBf16 : Avx512Bf16 {
  using Tiles = AmxTiles;

  // p[2 i] = bf16(even[i]), p[2 i + 1] = bf16(odd[i])
  static void store_pairs(bf16* p, F even, F odd) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi16(order, both));
  }

  static F load_int32(const void* p) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(p)); }

  // The largest magnitude in pair i of `rows` rows of 16 pairs; NaN is larger. Magnitudes of bf16 compare like
  // integers.
  static void largest_of_pairs(const bf16* pairs, int rows, float* largest) {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    __m512i most = _mm512_setzero_si512();
    for (int r = 0; r < rows; r++)
      most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(pairs + r * 32), magnitude));
    most = _mm512_max_epu16(_mm512_slli_epi32(most, 16), most);
    _mm512_storeu_si512(largest, _mm512_and_si512(most, _mm512_set1_epi32(int(0xffff0000u))));
  }
  // Four int8 for each token: its pairs in `low` and `high`, times its factor, rounded to nearest even.
  static void store_codes(int8_t* out, const bf16* low, const bf16* high, const float* factors) {
    const __m512 factor = _mm512_loadu_ps(factors);
    const auto code = [&](__m512i bits) {
      const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(bits), factor));
      return _mm512_and_si512(whole, _mm512_set1_epi32(255));
    };
    const __m512i odd = _mm512_set1_epi32(int(0xffff0000u));
    const __m512i ab = _mm512_loadu_si512(low), cd = _mm512_loadu_si512(high);
    const __m512i a = code(_mm512_slli_epi32(ab, 16)), b = code(_mm512_and_si512(ab, odd));
    const __m512i c = code(_mm512_slli_epi32(cd, 16)), d = code(_mm512_and_si512(cd, odd));
    const __m512i lower = _mm512_or_si512(a, _mm512_slli_epi32(b, 8));
    const __m512i upper = _mm512_or_si512(_mm512_slli_epi32(c, 16), _mm512_slli_epi32(d, 24));
    _mm512_storeu_si512(out, _mm512_or_si512(lower, upper));
  }
};

}  // namespace ktft
