#include "quant/encoding.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "quant/codecs.h"

namespace ktft {
namespace {

const std::array<float, 256>& fp8_values() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> v{};
    for (int code = 0; code < 256; code++)
      v[code] = (code & 0x7f) == 0x7f ? std::numeric_limits<float>::quiet_NaN()
                                      : half_to_float(uint16_t((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256;
    return v;
  }();
  return values;
}

// Calls fn(first column, end, index of their scale) for each block that row r crosses.
template <class Fn>
void each_block(const SourceMatrix& s, int r, const Fn& fn) {
  for (int c = 0; c < s.cols; c += s.block_cols) fn(c, std::min(s.cols, c + s.block_cols), s.scale_at(r, c));
}

void widen_fp8(const SourceMatrix& s, int r, float* out) {
  const uint8_t* codes = static_cast<const uint8_t*>(s.data) + size_t(r) * s.cols;
  const std::array<float, 256>& values = fp8_values();
  each_block(s, r, [&](int begin, int end, size_t at) {
    const float scale = static_cast<const float*>(s.scales)[at];
    for (int c = begin; c < end; c++) out[c] = values[codes[c]] * scale;
  });
}

// Writes table[code] * scale(index) for each block.
template <class Table>
void widen_nibbles(const SourceMatrix& s, int r, float* out, const Table& table_of_block) {
  const uint8_t* codes = static_cast<const uint8_t*>(s.data) + size_t(r) * (s.cols / 2);
  each_block(s, r, [&](int begin, int end, size_t at) {
    float table[16];
    table_of_block(at, table);
    for (int c = begin; c < end; c += 2) {
      out[c] = table[codes[c / 2] & 15];
      out[c + 1] = table[codes[c / 2] >> 4];
    }
  });
}

}  // namespace

int widen_row(const SourceMatrix& s, int r, float* out) {
  const size_t at = size_t(r) * s.cols;
  switch (s.encoding) {
    case Encoding::kF32: std::memcpy(out, static_cast<const float*>(s.data) + at, size_t(s.cols) * 4); break;
    case Encoding::kBf16:
      for (int c = 0; c < s.cols; c++) out[c] = to_float(static_cast<const bf16*>(s.data)[at + c]);
      break;
    case Encoding::kF16:
      for (int c = 0; c < s.cols; c++) out[c] = half_to_float(static_cast<const uint16_t*>(s.data)[at + c]);
      break;
    case Encoding::kFp8: widen_fp8(s, r, out); break;
    case Encoding::kInt4:
      widen_nibbles(s, r, out, [&](size_t block, float* table) {
        const float scale = static_cast<const float*>(s.scales)[block];
        const int zero = s.zeros ? s.zeros[block] : 8;
        for (int code = 0; code < 16; code++) table[code] = float(code - zero) * scale;
      });
      break;
    case Encoding::kMxfp4:
      widen_nibbles(s, r, out, [&](size_t block, float* table) {
        const uint8_t e = static_cast<const uint8_t*>(s.scales)[block];
        const float scale = e == 255 ? std::numeric_limits<float>::quiet_NaN() : power_of_two(e);
        for (int code = 0; code < 16; code++) table[code] = Mxfp4Policy::kTable[code] * scale;
      });
      break;
  }
  uint32_t bad = 0;
  for (int c = 0; c < s.cols; c++) {
    uint32_t bits;
    std::memcpy(&bits, out + c, 4);
    bad |= uint32_t((bits & 0x7f800000) == 0x7f800000);
  }
  if (!bad) return -1;
  return int(std::find_if(out, out + s.cols, [](float v) { return !std::isfinite(v); }) - out);
}

bool keeps(const SourceMatrix& s, Format format) {
  // The scale of a block that covers the whole matrix, or several blocks (groups) of the format, is repeated in each.
  const auto whole = [](int block, int unit, int dim) { return block % unit == 0 || block >= dim; };
  const size_t scales =
      size_t(ceil_div(s.rows, std::max(1, s.block_rows))) * ceil_div(s.cols, std::max(1, s.block_cols));
  switch (format) {
    case Format::kFp8:
      return s.encoding == Encoding::kFp8 && whole(s.block_rows, kScaleBlock, s.rows) &&
             whole(s.block_cols, kScaleBlock, s.cols);
    case Format::kMxfp4: return s.encoding == Encoding::kMxfp4 && whole(s.block_cols, kGroup, s.cols);
    case Format::kInt4: {
      if (s.encoding != Encoding::kInt4 || !whole(s.block_cols, kGroup, s.cols)) return false;
      const float* scale = static_cast<const float*>(s.scales);
      for (size_t i = 0; i < scales; i++)
        if (to_float(to_bf16(scale[i])) != scale[i] || (s.zeros && s.zeros[i] != 8)) return false;
      return true;
    }
    default: return false;
  }
}

}  // namespace ktft
