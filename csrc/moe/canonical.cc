// Converts between a whole matrix and the slices of it that nodes hold: as canonical bytes (see weights.h) and as fp32.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "moe/weights.h"

namespace ktft {
namespace {

constexpr int kUnitRows = kScaleBlock;  // rows of a task: whole strips, and whole rows of block scales

size_t strip_bytes(Format format, int cols) {
  return size_t(ceil_div(cols, info(format).tile_cols)) * info(format).tile_bytes;
}

// A node's slice within the whole matrix.
struct Part {
  PackedMatrix matrix;
  int rows, cols;            // of the whole
  int row_begin, col_begin;  // multiples of kSliceMultiple
};

// Calls copy(address in the slice, offset in the canonical bytes, bytes) for the tiles of a unit.
template <class Copy>
void each_strip(const Part& p, int unit, const Copy& copy) {
  const PackedMatrix& m = p.matrix;
  const FormatInfo& f = info(m.format);
  const size_t strip = strip_bytes(m.format, p.cols), left = size_t(p.col_begin / f.tile_cols) * f.tile_bytes;
  for (int r = unit * kUnitRows; r < std::min(m.rows, (unit + 1) * kUnitRows); r += kTileRows)
    copy(m.tile(r / kTileRows, 0), (p.row_begin + r) / kTileRows * strip + left, strip_bytes(m.format, m.cols));
}

// Does the same for its scales, if the format has any outside of tiles.
template <class Copy>
void each_scale_run(const Part& p, int unit, const Copy& copy) {
  const PackedMatrix& m = p.matrix;
  const size_t base = p.rows / kTileRows * strip_bytes(m.format, p.cols);
  const int first = unit * kUnitRows, end = std::min(m.rows, first + kUnitRows);
  if (m.row_scale)
    copy(m.row_scale + first, base + (p.row_begin + first) * sizeof(float), (end - first) * sizeof(float));
  if (m.block_scale) {
    const size_t at =
        size_t(p.row_begin + first) / kScaleBlock * ceil_div(p.cols, kScaleBlock) + p.col_begin / kScaleBlock;
    copy(&m.block_scale_at(first, 0), base + at * sizeof(float), ceil_div(m.cols, kScaleBlock) * sizeof(float));
  }
}

bool usable(const float* scales, size_t count, bool divides) {
  for (size_t i = 0; i < count; i++)
    if (!std::isfinite(scales[i]) || (divides && !(scales[i] > 0))) return false;
  return true;
}

}  // namespace

size_t PackedExperts::canonical_bytes(Projection projection) const {
  const int rows = shape_.rows(projection), cols = shape_.cols(projection);
  return rows / kTileRows * strip_bytes(format_, cols) + scale_count(format_, rows, cols) * sizeof(float);
}

// Calls fn(part, node, unit) on the pool for every unit of every node's slice of one matrix.
template <class Fn>
void PackedExperts::each_unit(Pool& pool, int expert, Projection projection, const Fn& fn) const {
  std::vector<Part> parts;
  std::vector<int> units(pool.nodes(), 0);
  for (int n = 0; n < nodes(); n++) {
    parts.push_back({.matrix = matrix(n, expert, projection),
                     .rows = shape_.rows(projection),
                     .cols = shape_.cols(projection),
                     .row_begin = row_begin(n, projection),
                     .col_begin = col_begin(n, projection)});
    units[n] = ceil_div(parts[n].matrix.rows, kUnitRows);
  }
  pool.run(units, [&](int node, int unit, int) { fn(parts[node], node, unit); });
}

void PackedExperts::export_canonical(Pool& pool, int expert, Projection projection, uint8_t* out) const {
  KTFT_CHECK(loaded(expert, projection), "expert ", expert, " was not loaded, there is nothing to export");
  const auto copy = [out](const void* packed, size_t at, size_t bytes) { std::memcpy(out + at, packed, bytes); };
  each_unit(pool, expert, projection, [&](const Part& part, int node, int unit) {
    each_strip(part, unit, copy);
    // Every slice of down has the scales of whole rows; they are taken from the first slice
    if (node == 0 || !part.matrix.row_scale || projection != Projection::kDown) each_scale_run(part, unit, copy);
  });
}

void PackedExperts::import_canonical(Pool& pool, int expert, Projection projection, const uint8_t* in) {
  std::atomic<bool> bad{false};
  each_unit(pool, expert, projection, [&](const Part& part, int, int unit) {
    each_strip(part, unit, [in](void* packed, size_t at, size_t bytes) { std::memcpy(packed, in + at, bytes); });
    each_scale_run(part, unit, [&](float* packed, size_t at, size_t bytes) {
      std::memcpy(packed, in + at, bytes);
      if (!usable(packed, bytes / sizeof(float), part.matrix.row_scale != nullptr)) bad = true;
    });
  });
  KTFT_CHECK(!bad, "it holds scales that are NaN, Inf or not positive");
  loaded_[size_t(expert) * kProjections + int(projection)] = true;
}

void PackedExperts::dequantize(Pool& pool, int expert, Projection projection, float* out) const {
  each_unit(pool, expert, projection, [&](const Part& part, int, int unit) {
    PackedMatrix m = part.matrix;
    const int first = unit * kUnitRows;
    m.tiles = m.tile(first / kTileRows, 0);
    if (m.row_scale) m.row_scale += first;
    if (m.block_scale) m.block_scale = &m.block_scale_at(first, 0);
    m.rows = std::min(kUnitRows, m.rows - first);
    unpack(m, out + size_t(part.row_begin + first) * part.cols + part.col_begin, part.cols);
  });
}

}  // namespace ktft
