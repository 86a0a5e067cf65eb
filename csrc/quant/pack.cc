#include "quant/pack.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "quant/with_codec.h"

namespace ktft {
namespace {

// Rows whose scale would be smaller are packed as zeros: such weights have no effect, and 1 / scale must stay finite.
constexpr float kLeastRowScale = 1e-30f;

// Calls fn(row of the slice, its source row as fp32) for a unit's rows, up to the first with NaN or Inf.
template <class Fn>
BadValue each_row(const SourceMatrix& source, int row_begin, const PackedMatrix& out, int unit, const Fn& fn) {
  const int first = unit * pack_rows(out.format), end = std::min(out.rows, first + pack_rows(out.format));
  std::vector<float> row(source.cols);
  for (int r = first; r < end; r++) {
    const int bad = widen_row(source, row_begin + r, row.data());
    if (bad >= 0) return {row_begin + r, bad};
    fn(r, row.data());
  }
  return {};
}

// Sets the scales of the blocks that the unit's rows fill.
template <class Codec>
BadValue scale_blocks(const SourceMatrix& source, int row_begin, int col_begin, const PackedMatrix& out, int unit) {
  std::vector<float> largest(ceil_div(out.cols, kScaleBlock), 0.f);
  const BadValue bad = each_row(source, row_begin, out, unit, [&](int, const float* row) {
    for (int c = 0; c < out.cols; c++)
      largest[c / kScaleBlock] = std::max(largest[c / kScaleBlock], std::fabs(row[col_begin + c]));
  });
  for (size_t b = 0; b < largest.size(); b++)
    out.block_scale_at(unit * kScaleBlock, int(b) * kScaleBlock) = largest[b] / Codec::kLargest;
  return bad;
}

template <class Codec>
BadValue pack_with(const SourceMatrix& source, int row_begin, int col_begin, const PackedMatrix& out, int unit) {
  constexpr FormatInfo format = info(Codec::kFormat);
  if constexpr (format.block_scaled) {
    const BadValue bad = scale_blocks<Codec>(source, row_begin, col_begin, out, unit);
    if (bad.row >= 0) return bad;
  }
  std::vector<float> hints(source.cols / kGroup);
  return each_row(source, row_begin, out, unit, [&](int r, const float* row) {
    float scale = 1;
    if constexpr (format.row_scaled) {
      // A row of zeros has scale 1, because LoRA and gradients are divided by row scales
      scale = Codec::prepare(row, source.cols, hints.data());
      if (scale < kLeastRowScale) scale = 0;
      out.row_scale[r] = scale > 0 ? scale : 1.f;
    }
    for (int c = 0; c < out.cols; c += format.tile_cols) {
      if constexpr (format.block_scaled) scale = out.block_scale_at(r, c);
      Codec::encode(row + col_begin + c, std::min(format.tile_cols, out.cols - c), scale,
                    hints.data() + (col_begin + c) / kGroup, out.tile(r / kTileRows, c / format.tile_cols),
                    r % kTileRows);
    }
  });
}

// Copies the codes of one row of the slice. The formats that can be kept are fp8, int4 and mxfp4.
void keep_row(const SourceMatrix& source, int source_row, int col_begin, const PackedMatrix& out, int r) {
  const uint8_t* codes = static_cast<const uint8_t*>(source.data);
  const int strip = r / kTileRows, row = r % kTileRows;
  if (out.format == Format::kFp8) {
    codes += size_t(source_row) * source.cols + col_begin;
    for (int c = 0; c < out.cols; c += kRowBytes) {
      uint8_t* const to = out.tile(strip, c / kRowBytes) + row * kRowBytes;
      const int count = std::min(kRowBytes, out.cols - c);
      std::copy(codes + c, codes + c + count, to);
      std::fill(to + count, to + kRowBytes, uint8_t(0));
    }
    return;
  }
  codes += (size_t(source_row) * source.cols + col_begin) / 2;
  const auto code = [&](int c) { return uint8_t(codes[c / 2] >> (c % 2 * 4) & 15); };
  constexpr int kTileCols = kRowBytes * 2;
  for (int c = 0; c < ceil_div(out.cols, kTileCols) * kTileCols; c += kGroup) {
    uint8_t* const tile = out.tile(strip, c / kTileCols);
    uint8_t* const to = tile + row * kRowBytes + c % kTileCols / 2;
    const int group = row * 4 + c % kTileCols / kGroup;
    const bool inside = c < out.cols;
    for (int i = 0; i < 16; i++) to[i] = inside ? uint8_t(code(c + i) | code(c + 16 + i) << 4) : uint8_t(0);
    const size_t at = inside ? source.scale_at(source_row, col_begin + c) : 0;
    if (out.format == Format::kMxfp4)
      tile[kCodeBytes + group] = inside ? static_cast<const uint8_t*>(source.scales)[at] : uint8_t(0);
    else
      reinterpret_cast<bf16*>(tile + kCodeBytes)[group] =
          inside ? to_bf16(static_cast<const float*>(source.scales)[at]) : bf16{0};
  }
}

BadValue keep_unit(const SourceMatrix& source, int row_begin, int col_begin, const PackedMatrix& out, int unit) {
  const int first = unit * pack_rows(out.format);
  if (out.block_scale)
    for (int c = 0; c < out.cols; c += kScaleBlock)
      out.block_scale_at(first, c) =
          static_cast<const float*>(source.scales)[source.scale_at(row_begin + first, col_begin + c)];
  return each_row(source, row_begin, out, unit,
                  [&](int r, const float*) { keep_row(source, row_begin + r, col_begin, out, r); });
}

}  // namespace

BadValue pack(const SourceMatrix& source, int row_begin, int col_begin, const PackedMatrix& out, int unit, bool keep) {
  if (keep) return keep_unit(source, row_begin, col_begin, out, unit);
  return with_codec(out.format,
                    [&]<class Codec>() { return pack_with<Codec>(source, row_begin, col_begin, out, unit); });
}

void unpack(const PackedMatrix& matrix, float* dst, size_t ld) {
  with_codec(matrix.format, [&]<class Codec>() {
    for (int r = 0; r < matrix.rows; r++)
      for (int c = 0; c < matrix.cols; c++) dst[size_t(r) * ld + c] = Codec::decode_one(matrix, r, c);
  });
}

}  // namespace ktft
