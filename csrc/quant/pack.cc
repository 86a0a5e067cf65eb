#include "quant/pack.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "quant/bf16-inl.h"
#include "quant/int8-inl.h"

namespace ktft {
namespace {

// Widens row `r` to fp32; returns the column of the first NaN or Inf, or -1.
int widen_row(const SourceMatrix& s, int r, float* out) {
  const size_t at = size_t(r) * s.cols;
  switch (s.dtype) {
    case Dtype::kF32: std::memcpy(out, static_cast<const float*>(s.data) + at, size_t(s.cols) * 4); break;
    case Dtype::kBf16:
      for (int c = 0; c < s.cols; c++) out[c] = to_float(static_cast<const bf16*>(s.data)[at + c]);
      break;
    case Dtype::kF16:
      for (int c = 0; c < s.cols; c++) out[c] = half_to_float(static_cast<const uint16_t*>(s.data)[at + c]);
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

template <class Codec>
BadValue pack_with(const SourceMatrix& source, int row_begin, int col_begin, const PackedMatrix& out, int strip) {
  const int tile_cols = info(Codec::kFormat).tile_cols;
  std::vector<float> row(source.cols);
  for (int i = 0; i < kTileRows; i++) {
    const int r = row_begin + strip * kTileRows + i;
    const int bad = widen_row(source, r, row.data());
    if (bad >= 0) return {r, bad};
    const float scale = Codec::scale_of(row.data(), source.cols);
    if (out.row_scale) out.row_scale[strip * kTileRows + i] = scale;
    for (int t = 0; t < out.col_tiles(); t++) {
      const int left = std::min(tile_cols, out.cols - t * tile_cols);
      Codec::encode(row.data() + col_begin + t * tile_cols, left, scale, out.tile(strip, t) + i * kRowBytes);
    }
  }
  return {};
}

template <class Codec>
void unpack_with(const PackedMatrix& m, float* dst, size_t ld) {
  const int tile_cols = info(Codec::kFormat).tile_cols;
  for (int r = 0; r < m.rows; r++) {
    const float scale = m.row_scale ? m.row_scale[r] : 1.f;
    for (int c = 0; c < m.cols; c++) {
      const uint8_t* row = m.tile(r / kTileRows, c / tile_cols) + (r % kTileRows) * kRowBytes;
      dst[size_t(r) * ld + c] = Codec::decode_one(row, c % tile_cols) * scale;
    }
  }
}

}  // namespace

BadValue pack_strip(const SourceMatrix& source, int row_begin, int col_begin, const PackedMatrix& out, int strip) {
  switch (out.format) {
    case Format::kBf16: return pack_with<Bf16Codec>(source, row_begin, col_begin, out, strip);
    case Format::kInt8: return pack_with<Int8Codec>(source, row_begin, col_begin, out, strip);
  }
  return {};
}

void unpack(const PackedMatrix& matrix, float* dst, size_t ld) {
  switch (matrix.format) {
    case Format::kBf16: return unpack_with<Bf16Codec>(matrix, dst, ld);
    case Format::kInt8: return unpack_with<Int8Codec>(matrix, dst, ld);
  }
}

}  // namespace ktft
