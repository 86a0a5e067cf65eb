// Packs rows of a checkpoint tensor into tiles, and unpacks them for tests and error reports.
#pragma once

#include <atomic>

#include "base/check.h"
#include "quant/encoding.h"

namespace ktft {

struct BadValue {
  int row = -1, col = -1;  // row < 0: none
};

// The first NaN or Inf of a matrix, whichever thread found it.
class FirstBad {
 public:
  void note(BadValue value, int cols) {
    if (value.row < 0) return;
    const int64_t at = int64_t(value.row) * cols + value.col;
    for (int64_t seen = at_; (seen < 0 || at < seen) && !at_.compare_exchange_weak(seen, at);) {
    }
  }
  // Throws if there is one.
  void refuse(int cols) const {
    KTFT_CHECK(at_ < 0, "it holds NaN or Inf, for instance at [", at_ / cols, ", ", at_ % cols, "]");
  }

 private:
  std::atomic<int64_t> at_{-1};
};

// The rows of a unit, which share scales and are packed together. The last unit may be short.
constexpr int pack_rows(Format format) { return info(format).block_scaled ? kScaleBlock : kTileRows; }

// Packs unit `unit` of `out`, whose first row and column are row_begin and col_begin of the source, multiples of
// kSliceMultiple. With `keep`, which keeps() must allow, codes and scales stay unchanged. A row's scale comes from the
// whole source row, so that slices agree. Returns the first NaN or Inf; the unit's content is then undefined.
BadValue pack(const SourceMatrix& source, int row_begin, int col_begin, const PackedMatrix& out, int unit, bool keep);

// Dequantizes the rows of the matrix into dst, whose row stride is ld.
void unpack(const PackedMatrix& matrix, float* dst, size_t ld);

}  // namespace ktft
