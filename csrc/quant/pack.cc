#include "quant/pack.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "quant/codecs.h"

namespace ktft {
namespace {

// Rows that would have smaller scales are packed as zeros: such weights do nothing, and 1 / scale must stay finite.
constexpr float kLeastRowScale = 1e-30f;

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

// Scales of the blocks that rows [row, row + rows) of the slice lie in; rows begin at a block's first.
template <class Codec>
BadValue scale_blocks(const SourceMatrix& source, int row_begin, int col_begin, const PackedMatrix& out, int row,
                      int rows) {
  std::vector<float> values(source.cols), largest(ceil_div(out.cols, kScaleBlock), 0.f);
  for (int r = row; r < row + rows; r++) {
    const int bad = widen_row(source, row_begin + r, values.data());
    if (bad >= 0) return {row_begin + r, bad};
    for (int c = 0; c < out.cols; c++)
      largest[c / kScaleBlock] = std::max(largest[c / kScaleBlock], std::fabs(values[col_begin + c]));
  }
  for (size_t b = 0; b < largest.size(); b++)
    out.block_scale_at(row, int(b) * kScaleBlock) = largest[b] / Codec::kLargest;
  return {};
}

template <class Codec>
BadValue pack_with(const SourceMatrix& source, int row_begin, int col_begin, const PackedMatrix& out, int unit) {
  constexpr FormatInfo format = info(Codec::kFormat);
  const int first = unit * pack_rows(out.format), end = std::min(out.rows, first + pack_rows(out.format));
  std::vector<float> row(source.cols), hints(source.cols / kGroup);
  if constexpr (format.block_scaled) {
    const BadValue bad = scale_blocks<Codec>(source, row_begin, col_begin, out, first, end - first);
    if (bad.row >= 0) return bad;
  }
  for (int r = first; r < end; r++) {
    const int bad = widen_row(source, row_begin + r, row.data());
    if (bad >= 0) return {row_begin + r, bad};
    float scale = Codec::prepare(row.data(), source.cols, hints.data());
    if (out.row_scale) {
      // The scale of zeros is 1: LoRA and gradients are divided by row scales
      if (scale < kLeastRowScale) scale = 0;
      out.row_scale[r] = scale > 0 ? scale : 1.f;
    }
    for (int c = 0; c < out.cols; c += format.tile_cols) {
      if constexpr (format.block_scaled) scale = out.block_scale_at(r, c);
      Codec::encode(row.data() + col_begin + c, std::min(format.tile_cols, out.cols - c), scale,
                    hints.data() + (col_begin + c) / kGroup, out.tile(r / kTileRows, c / format.tile_cols),
                    r % kTileRows);
    }
  }
  return {};
}

template <class Codec>
void unpack_with(const PackedMatrix& m, float* dst, size_t ld) {
  for (int r = 0; r < m.rows; r++)
    for (int c = 0; c < m.cols; c++) dst[size_t(r) * ld + c] = Codec::decode_one(m, r, c);
}

// Calls f.template operator()<Codec>() with the format's codec.
template <class Fn>
auto with_codec(Format format, const Fn& f) {
  switch (format) {
    case Format::kBf16: break;
    case Format::kInt8: return f.template operator()<Int8Codec>();
    case Format::kFp8: return f.template operator()<Fp8Codec>();
    case Format::kK4: return f.template operator()<K4Codec>();
    case Format::kInt4: return f.template operator()<Int4Codec>();
    case Format::kMxfp4: return f.template operator()<Mxfp4Codec>();
  }
  return f.template operator()<Bf16Codec>();
}

}  // namespace

BadValue pack(const SourceMatrix& source, int row_begin, int col_begin, const PackedMatrix& out, int unit) {
  return with_codec(out.format,
                    [&]<class Codec>() { return pack_with<Codec>(source, row_begin, col_begin, out, unit); });
}

void unpack(const PackedMatrix& matrix, float* dst, size_t ld) {
  with_codec(matrix.format, [&]<class Codec>() { unpack_with<Codec>(matrix, dst, ld); });
}

}  // namespace ktft
