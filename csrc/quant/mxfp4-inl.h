// mxfp4: OCP MX v1.0: W = q * 2^(e - 127), q in E2M1 (sign in bit 3), e a byte for each 32 inputs. Exact in bf16.
//
// The encoder follows the specification (section 6.3): e is the exponent of the largest magnitude minus 2, the largest
// exponent of E2M1. Values round to nearest, ties to even, and values above 6 become 6.
#pragma once

#include "quant/nibble-inl.h"

namespace ktft {

// 2^(e - 127). e = 255, which means NaN in the specification, is never written.
static inline float power_of_two(uint8_t e) {
  const uint32_t bits = e ? uint32_t(e) << 23 : 0x00400000;  // 2^-127 is subnormal
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

struct Mxfp4Policy {
  static constexpr Format kFormat = Format::kMxfp4;
  static constexpr int kScales = 255;
  static constexpr float kUnit = 0.5f;
  using Scale = uint8_t;
  static constexpr const char* kScaleKind = "power_of_two";
  static constexpr float kTable[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

  template <class V>
  static float multiplier(Scale e) {
    return power_of_two(e);
  }

  static Scale encode_group(const float* v, float, float, uint8_t* codes) {
    float largest = 0;
    for (int i = 0; i < kGroup; i++) largest = std::max(largest, std::fabs(v[i]));
    if (largest < kTiny) return 0;
    const Scale e = Scale(std::ilogb(largest) - 2 + 127);
    for (int i = 0; i < kGroup; i++) {
      const float q = std::fabs(v[i]) / power_of_two(e);
      const int size = (q > 0.25f) + (q >= 0.75f) + (q > 1.25f) + (q >= 1.75f) + (q > 2.5f) + (q >= 3.5f) + (q > 5);
      codes[i] = uint8_t(size | (v[i] < 0 && size ? 8 : 0));
    }
    return e;
  }
};

using Mxfp4Codec = NibbleCodec<Mxfp4Policy>;

}  // namespace ktft
