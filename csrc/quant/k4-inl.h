// k4: 4.25 bits: W = row_scale * bf16(sub * codebook[q]), q 4 bits, sub in [1, 64] for each 32 inputs, row_scale fp32.
//
// Decoding is exact, since the rounding to bf16 is part of the format; with sub = 64, the row's largest group, nothing
// is rounded. The codebook is the Lloyd-Max quantizer for Gaussian groups of 32 under this encoder's own choice of
// scale, rounded to integers (tests/scripts/k4_codebook.py computes it). It is symmetric, with the sign in bit 3, and
// has no zero: sub = 0 makes a group of zeros.
//
// The encoder takes a group's scale from a few candidates, each refined to the least-squares scale of the codes it
// gives. The row's scale is the largest group scale / 64. sub is then the best of the three nearest integers.
#pragma once

#include <array>

#include "quant/nibble-inl.h"

namespace ktft {

struct K4Policy {
  static constexpr Format kFormat = Format::kK4;
  static constexpr int kScales = 65;
  static constexpr float kUnit = 1;
  using Scale = uint8_t;
  static constexpr const char* kScaleKind = "integer";
  static constexpr float kTable[16] = {6, 18, 31, 45, 60, 77, 98, 127, -6, -18, -31, -45, -60, -77, -98, -127};
  // Candidates for the codebook value to which a group's largest magnitude is mapped.
  static constexpr float kCandidates[] = {127, 112, 119, 136, 147, 160};
  static constexpr int kLargestSub = 64;

  // The code whose magnitude is nearest to i.
  static constexpr std::array<uint8_t, 128> kNearest = [] {
    std::array<uint8_t, 128> nearest{};
    for (int i = 0, code = 0; i < 128; i++) {
      while (code < 7 && 2 * i > int(kTable[code]) + int(kTable[code + 1])) code++;
      nearest[i] = uint8_t(code);
    }
    return nearest;
  }();

  template <class V>
  static float multiplier(Scale sub) {
    return float(sub);
  }

  static uint8_t nearest(float size) { return kNearest[std::lrintf(std::min(127.f, size))]; }

  // The best scale of one group by itself, 0 for a group of zeros.
  static float group_scale(const float* v) {
    float largest = 0;
    for (int i = 0; i < kGroup; i++) largest = std::max(largest, std::fabs(v[i]));
    if (largest < kTiny) return 0;
    float best = 0, best_inverse = 0;
    for (float candidate : kCandidates) {
      const float inverse = candidate / largest;
      float vc = 0, cc = 0;
      for (int i = 0; i < kGroup; i++) {
        const float size = std::fabs(v[i]) * inverse, c = kTable[nearest(size)];
        vc += size * c;
        cc += c * c;
      }
      // At the best s, sum (v - s c)^2 is sum v^2 - (sum v c)^2 / sum c^2
      const float score = vc * vc / (cc * candidate * candidate);  // v is in units of the largest, against overflow
      if (score > best) best = score, best_inverse = inverse;
    }
    double vc = 0, cc = 0;
    for (int i = 0; i < kGroup; i++) {
      const float c = kTable[nearest(std::fabs(v[i]) * best_inverse)];
      vc += double(std::fabs(v[i])) * c;
      cc += double(c) * c;
    }
    return float(vc / cc);
  }

  static float prepare(const float* row, int cols, float* hints) {
    float largest = 0;
    for (int g = 0; g < cols / kGroup; g++) {
      hints[g] = group_scale(row + g * kGroup);
      largest = std::max(largest, hints[g]);
    }
    return largest / kLargestSub;
  }

  static Scale encode_group(const float* v, float row_scale, float hint, uint8_t* codes) {
    if (!(row_scale > 0) || hint == 0) return 0;
    const int near = int(std::lrintf(std::min(float(kLargestSub), hint / row_scale)));
    float least = 0;  // error of sub = 0, the best choice for a group that is tiny compared with the row's largest
    for (int i = 0; i < kGroup; i++) least += (v[i] / row_scale) * (v[i] / row_scale);
    int sub = 0;
    for (int s = std::max(1, near - 1); s <= std::min(kLargestSub, near + 1); s++) {
      const float scale = row_scale * float(s), inverse = 1 / scale;
      uint8_t found[kGroup];
      float error = 0;
      for (int i = 0; i < kGroup; i++) {
        const float size = std::fabs(v[i]);
        found[i] = nearest(size * inverse);
        const float d = size * inverse - kTable[found[i]];
        error += d * d;
        found[i] |= v[i] < 0 ? 8 : 0;
      }
      error *= float(s * s);  // in units of row_scale, against overflow
      if (!(error < least)) continue;
      least = error;
      sub = s;
      std::copy(found, found + kGroup, codes);
    }
    return Scale(sub);
  }
};

struct K4Codec : NibbleCodec<K4Policy> {
  // Multiples of the row's scale, row by row. bf16 holds them as whole numbers.
  static constexpr int kLargestWord = kLargestSub * 127;
  template <class V>
  static void decode_words(const PackedMatrix& w, int strip, int piece, int16_t* out) {
    const auto& values = CodeValues<K4Policy, V, int16_t>::get();
    const uint8_t* const tile = w.tile(strip, piece / 4);
    const uint8_t *const codes = tile + piece % 4 * 16, *const subs = tile + kCodeBytes + piece % 4;
    for (int r = 0; r < kTileRows; r++) V::look_up(values.rows[subs[r * 4]], codes + r * kRowBytes, out + r * 32);
  }
};

}  // namespace ktft
