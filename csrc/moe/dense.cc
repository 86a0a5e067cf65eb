#include "moe/dense.h"

#include <cstring>

#include "base/check.h"
#include "quant/pack.h"

namespace ktft {

size_t dense_bytes(Format format, int rows, int cols) {
  return size_t(rows / kTileRows) * weight_strip_bytes(format, cols) + scale_count(format, rows, cols) * sizeof(float);
}

bool pack_dense(Pool& pool, Format format, const SourceMatrix& source, void* out) {
  const int rows = source.rows, cols = source.cols;
  KTFT_CHECK(rows % kTileRows == 0 && cols % kDimMultiple == 0, "[", rows, ", ", cols, "] is not [a multiple of ",
             kTileRows, ", a multiple of ", kDimMultiple, "]");
  const int64_t strip_bytes = weight_strip_bytes(format, cols);
  uint8_t* const tiles = static_cast<uint8_t*>(out);
  float* const scales = reinterpret_cast<float*>(tiles + rows / kTileRows * strip_bytes);
  PackedMatrix matrix{.format = format, .rows = rows, .cols = cols, .tiles = tiles, .strip_bytes = strip_bytes};
  if (info(format).row_scaled) matrix.row_scale = scales;
  if (info(format).block_scaled) matrix.block_scale = scales;
  const bool keep = keeps(source, format);
  // The bytes behind each strip are copied and compared with the rest
  std::memset(out, 0, dense_bytes(format, rows, cols));
  FirstBad bad;
  pool.run(ceil_div(rows, pack_rows(format)),
           [&](int unit, int) { bad.note(pack(source, 0, 0, matrix, unit, keep), cols); });
  bad.refuse(cols);
  return keep;
}

}  // namespace ktft
