// Scalar types and the enums that name ISAs, passes and projections.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ktft {

struct bf16 {
  uint16_t bits;
};

enum class Isa { kAmxEmu, kScalar, kAvx2, kAvx512, kAvx512Bf16, kAmxBf16 };  // slowest first
enum class Pass { kForward, kBackward };
enum class Dtype { kF32, kBf16, kF16 };
enum class Projection { kGate, kUp, kDown };

constexpr Projection kGateUp[] = {Projection::kGate, Projection::kUp};
constexpr int kIsas = 6;
constexpr int kPasses = 2;
constexpr int kProjections = 3;

constexpr size_t kCacheLine = 64;
static constexpr size_t in_lines(size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

static constexpr size_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

// Helpers are static so that the linker cannot use a copy compiled for AVX-512 in code that runs on every CPU.
static inline float to_float(bf16 v) {
  const uint32_t bits = uint32_t(v.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Rounds to nearest even; NaN stays NaN.
static inline bf16 to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return {uint16_t(bits >> 16 | 0x40)};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// Prefetches a cache line into L2, or also into L1. Not __builtin_prefetch: GCC considers a function that does nothing
// else to have no effect and drops the calls to it.
static inline void prefetch(const void* line) {
  __asm__ volatile("prefetcht1 %0" ::"m"(*static_cast<const char*>(line)));
}
static inline void prefetch_l1(const void* line) {
  __asm__ volatile("prefetcht0 %0" ::"m"(*static_cast<const char*>(line)));
}
static inline void prefetch(const void* begin, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) prefetch(static_cast<const char*>(begin) + i);
}

static inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
  float f;
  if (exponent == 0) {
    f = float(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -f : f;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | mantissa << 13;
  std::memcpy(&f, &bits, 4);
  return f;
}

static inline uint16_t float_to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // subnormal: adding 0.5 aligns the mantissa and rounds it to nearest even
    float a;
    std::memcpy(&a, &magnitude, 4);
    a += 0.5f;
    uint32_t r;
    std::memcpy(&r, &a, 4);
    return uint16_t(sign | (r - 0x3f000000));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return uint16_t(sign | ((rounded - 0x38000000) >> 13));
}

}  // namespace ktft
