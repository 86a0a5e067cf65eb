// Products of bytes on AVX2, for ISAs without AVX-512-VNNI.
#pragma once

#include <immintrin.h>

#include "base/types.h"

namespace ktft {

// See VnniCodes (isa/avx512_bf16.h). Without an instruction for unsigned times signed bytes that cannot overflow,
// values stay signed, and the sign of x goes to them: |x| <= 128 and |value| <= 127 make pairs of products fit 16 bits.
// The ISA is a parameter so that ISAs share no code.
template <class Isa>
struct MaddCodes {
  static constexpr int kOffset = 0, kOutputs = 8, kInputRows = 2;
  struct Bytes {
    __m256i half[2];
  };

  static Bytes load(const void* p) {
    const auto at = static_cast<const __m256i*>(p);
    return {{_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)}};
  }
  static void store(void* p, const Bytes& v) {
    for (int i = 0; i < 2; i++) _mm256_storeu_si256(static_cast<__m256i*>(p) + i, v.half[i]);
  }
  template <class Fn>
  static Bytes each(const Bytes& v, const Fn& fn) {
    return {{fn(v.half[0]), fn(v.half[1])}};
  }
  static Bytes table(const uint8_t* values) {
    return each(load(values), [](__m256i v) { return _mm256_xor_si256(v, _mm256_set1_epi8(-128)); });
  }
  static Bytes low_values(const Bytes& table, const Bytes& codes) {
    return each(codes, [&](__m256i v) {
      return _mm256_shuffle_epi8(table.half[0], _mm256_and_si256(v, _mm256_set1_epi8(15)));
    });
  }
  static Bytes high_values(const Bytes& table, const Bytes& codes) {
    return low_values(table, each(codes, [](__m256i v) { return _mm256_srli_epi16(v, 4); }));
  }
  static Bytes values(const Bytes& codes) { return codes; }
  static Bytes ones() { return {{_mm256_set1_epi16(1), _mm256_set1_epi16(1)}}; }
  // Words, which `dot` multiplies pairs of products by: those of bytes 16 g to 16 g + 15 are integers[g].
  static Bytes pair_weights(const uint8_t* integers) {
    int32_t all;
    __builtin_memcpy(&all, integers, sizeof all);
    const __m256i words = _mm256_setr_epi32(0x80008000, 0x80008000, 0x80008000, 0x80008000,  //
                                            0x80018001, 0x80018001, 0x80018001, 0x80018001);
    return {{_mm256_shuffle_epi8(_mm256_set1_epi32(all), words),
             _mm256_shuffle_epi8(_mm256_set1_epi32(all), _mm256_add_epi8(words, _mm256_set1_epi16(2)))}};
  }
  static Bytes dot(const Bytes& sums, const Bytes& values, const Bytes& x, const Bytes& weights = ones()) {
    Bytes out;
    for (int i = 0; i < 2; i++) {
      const __m256i pairs =
          _mm256_maddubs_epi16(_mm256_abs_epi8(x.half[i]), _mm256_sign_epi8(values.half[i], x.half[i]));
      out.half[i] = _mm256_add_epi32(sums.half[i], _mm256_madd_epi16(pairs, weights.half[i]));
    }
    return out;
  }
  static Bytes dot_low(const Bytes& sums, const Bytes& values, const Bytes& x, const Bytes& weights = ones()) {
    Bytes out;
    for (int i = 0; i < 2; i++) {
      const __m256i pairs = _mm256_maddubs_epi16(x.half[i], values.half[i]);
      out.half[i] = _mm256_add_epi32(sums.half[i], _mm256_madd_epi16(pairs, weights.half[i]));
    }
    return out;
  }
  // Four columns of X. The bits of a value are flipped where x is negative, which makes it -1 - value: a sum begins
  // with the magnitudes of these x. Flipping needs none of the units that multiply; giving values a sign does.
  using Outputs = __m256i;
  struct Inputs {
    int32_t flips, magnitudes;
  };
  static Outputs all_outputs(int32_t value) { return _mm256_set1_epi32(value); }
  static Outputs load_outputs(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static Outputs add_products(Outputs sums, Outputs values, const Inputs& x) {
    const __m256i flipped = _mm256_xor_si256(values, _mm256_set1_epi32(x.flips));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi32(x.magnitudes), flipped);
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static __m256 to_float(Outputs sums) { return _mm256_cvtepi32_ps(sums); }
  static int32_t round_group(const bf16* x, float factor, Inputs* out) {
    const __m256i low = _mm256_packs_epi32(whole(x, factor), whole(x + 8, factor));
    const __m256i high = _mm256_packs_epi32(whole(x + 16, factor), whole(x + 24, factor));
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), zero = _mm256_setzero_si256();
    const __m256i all = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), in_order);
    const __m256i magnitudes = _mm256_abs_epi8(all), flips = _mm256_cmpgt_epi8(zero, all);
    const __m256i first = _mm256_unpacklo_epi32(flips, magnitudes), second = _mm256_unpackhi_epi32(flips, magnitudes);
    __m256i* const to = reinterpret_cast<__m256i*>(out);
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(first, second, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(first, second, 0x31));
    const __m256i sums = _mm256_sad_epu8(_mm256_and_si256(magnitudes, flips), zero);
    const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 2);
  }
  static void columns_of_four(const float* in, float* out, int apart) {
    for (int r = 0; r < 16; r += 4, in += 16) {
      __m128 a = _mm_load_ps(in), b = _mm_load_ps(in + 4), c = _mm_load_ps(in + 8), d = _mm_load_ps(in + 12);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      _mm_store_ps(out + r, a), _mm_store_ps(out + apart + r, b), _mm_store_ps(out + 2 * apart + r, c);
      _mm_store_ps(out + 3 * apart + r, d);
    }
  }
  static Bytes times_128(const Bytes& lanes) {
    return each(lanes, [](__m256i v) { return _mm256_slli_epi32(v, 7); });
  }
  static void add_scaled(float* sums, const Bytes& lanes, const float* scales) {
    const __m256 all = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(scales));
    for (int i = 0; i < 2; i++) {
      const __m256i spread = _mm256_set_epi32(2 * i + 1, 2 * i + 1, 2 * i + 1, 2 * i + 1, 2 * i, 2 * i, 2 * i, 2 * i);
      add(sums + 8 * i, lanes.half[i], _mm256_permutevar_ps(all, spread));
    }
  }
  static void add_scaled_lanes(float* sums, const Bytes& lanes, const float* scales) {
    for (int i = 0; i < 2; i++) add(sums + 8 * i, lanes.half[i], _mm256_loadu_ps(scales + 8 * i));
  }
  static void add(float* sums, __m256i lanes, __m256 scales) {
    _mm256_storeu_ps(sums, _mm256_fmadd_ps(_mm256_cvtepi32_ps(lanes), scales, _mm256_loadu_ps(sums)));
  }
  static int largest_magnitude(const bf16* x) {
    const auto at = reinterpret_cast<const __m256i*>(x);
    const __m256i magnitude = _mm256_set1_epi16(0x7fff);
    const __m256i half = _mm256_max_epu16(_mm256_and_si256(_mm256_loadu_si256(at), magnitude),
                                          _mm256_and_si256(_mm256_loadu_si256(at + 1), magnitude));
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return 0xffff - _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))), 0);
  }
  static __m256i whole(const bf16* x, float factor) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)), _mm256_set1_ps(factor)));
  }
  static void pack(int8_t* to, __m256i first, __m256i second) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }
  static void round(const bf16* x, float factor, int8_t* out) { pack(out, whole(x, factor), whole(x + 8, factor)); }
  static void split(const bf16* x, float factor, int8_t* high, int8_t* low) {
    const __m256i first = whole(x, factor), second = whole(x + 8, factor), low_bits = _mm256_set1_epi32(127);
    pack(high, _mm256_srai_epi32(first, 7), _mm256_srai_epi32(second, 7));
    pack(low, _mm256_and_si256(first, low_bits), _mm256_and_si256(second, low_bits));
  }
};

}  // namespace ktft
