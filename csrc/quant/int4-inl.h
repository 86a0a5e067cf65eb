// int4: compressed-tensors' pack-quantized, symmetric, group 32: W = bf16(q * s), q in [-8, 7] stored as q + 8, s bf16.
//
// The encoder chooses the sign of s so that the group's extreme is negative, where there is one code more. It tries
// magnitudes from extreme / 7 (nothing is clipped) to extreme / 9.5 and keeps the one with the least squared error.
#pragma once

#include "quant/nibble-inl.h"

namespace ktft {

struct Int4Policy {
  static constexpr Format kFormat = Format::kInt4;
  static constexpr int kScales = 0;
  static constexpr float kUnit = 1;
  using Scale = bf16;
  static constexpr const char* kScaleKind = "bf16";
  static constexpr float kTable[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  static constexpr float kCandidates[] = {7, 8, 7.5f, 8.5f, 9, 9.5f};

  template <class V>
  static float multiplier(Scale s) {
    return to_float(s);
  }

  static Scale encode_group(const float* v, float, float, uint8_t* codes) {
    float extreme = 0, least = INFINITY;
    for (int i = 0; i < kGroup; i++) extreme = std::fabs(v[i]) > std::fabs(extreme) ? v[i] : extreme;
    Scale best{};
    std::fill(codes, codes + kGroup, uint8_t(8));
    if (std::fabs(extreme) < kTiny) return best;
    for (float candidate : kCandidates) {
      const Scale s = to_bf16(-extreme / candidate);
      const float inverse = 1 / to_float(s), unit = 1 / (inverse * extreme);
      float q[kGroup], error = 0;
      for (int i = 0; i < kGroup; i++) {
        q[i] = float(std::lrintf(std::max(-8.f, std::min(7.f, v[i] * inverse))));
        const float d = (v[i] * inverse - q[i]) * unit;  // in units of the extreme, against overflow
        error += d * d;
      }
      if (!(error < least)) continue;
      least = error;
      best = s;
      for (int i = 0; i < kGroup; i++) codes[i] = uint8_t(int(q[i]) + 8);
    }
    return best;
  }
};

using Int4Codec = NibbleCodec<Int4Policy>;

}  // namespace ktft
