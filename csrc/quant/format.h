// The memory layout of one weight matrix W [rows, cols].
//
// A tile is 16 rows x 64 bytes, row-major, which hold `tile_cols` columns, then the scales of its 32-column groups
// where the format has them. The tiles of a 16-row strip are contiguous, and the strips follow each other. Columns are
// padded to whole tiles, rows are a multiple of 16. Both passes read this copy through its codec (one file for each
// format) in pieces: 16 rows x 32 columns of bf16, row-major.
//
// A codec has
//   kFormat, kCodes                    kCodes: the type of a code by torch's name; uint8 holds two 4-bit codes
//   decode<V>(w, strip, piece, spare)  a piece, without the row scale; in place or in spare. The kernels' side.
//   encode, decode_one                 one row of a tile, one value. For pack.cc only, as is
//   prepare(row, cols, hints)          one row's scale, of row-scaled formats; hints are for encode, one a group
#pragma once

#include <iterator>

#include "base/types.h"

namespace ktft {

constexpr int kTileRows = 16;
constexpr int kRowBytes = 64;
constexpr int kCodeBytes = kTileRows * kRowBytes;  // of a tile, without its scales
constexpr int kGroup = 32;                         // columns that share a scale in the 4-bit formats; width of a piece
constexpr int kPieceElements = kTileRows * kGroup;
constexpr int kScaleBlock = 128;     // rows and columns that share a scale in fp8
constexpr int kDimMultiple = 32;     // hidden and intermediate sizes: one piece of columns, two tiles of rows
constexpr int kSliceMultiple = 128;  // slices of a matrix begin at these, so they hold whole tiles and scale blocks

enum class Format {
#define KTFT_FORMAT(name, Codec, entry, ...) entry,
#include "quant/formats.inc"
#undef KTFT_FORMAT
};

struct FormatInfo {
  const char* name;
  int tile_cols;      // columns in one tile
  int tile_bytes;     // codes and group scales; a multiple of 64
  bool row_scaled;    // W = diag(scale) * Q with one fp32 scale for each row, applied by the kernels' callers
  bool block_scaled;  // one fp32 scale for each block of 128 x 128, applied by decoding
  // The largest number of tokens for which a tile ISA's forward was measured to be faster with dot products of rows
  // that were prepared once (kernels/strips-inl.h) than with tiles; at most kFewRows.
  int dot_tokens;
};

constexpr FormatInfo kFormatInfo[] = {
#define KTFT_FORMAT(name, Codec, entry, tile_cols, tile_bytes, row_scaled, block_scaled, dot_tokens) \
  {#name, tile_cols, tile_bytes, row_scaled, block_scaled, dot_tokens},
#include "quant/formats.inc"
#undef KTFT_FORMAT
};
constexpr int kFormats = int(std::size(kFormatInfo));

constexpr const FormatInfo& info(Format format) { return kFormatInfo[int(format)]; }

// Rounds to the nearest integer, ties to even, for |v| < 2^22. std::lrintf would keep loops from being vectorized.
static inline int round_even(float v) {
  constexpr float kShift = 12582912.f;  // 1.5 * 2^23 leaves no bits for a fraction
  return int((v + kShift) - kShift);
}

static constexpr int ceil_div(int value, int unit) { return (value + unit - 1) / unit; }

struct PackedMatrix {
  Format format;
  int rows, cols;
  uint8_t* tiles;
  float* row_scale = nullptr;    // [rows], or null when the format has none
  float* block_scale = nullptr;  // [ceil(rows / 128), ceil(cols / 128)], or null when the format has none
  int64_t strip_bytes;           // from one strip to the next
  float* bias = nullptr;         // [rows], or null; applied by the kernels' callers

  int col_tiles() const { return ceil_div(cols, info(format).tile_cols); }
  uint8_t* tile(int row_tile, int col_tile) const {
    return tiles + row_tile * strip_bytes + size_t(col_tile) * info(format).tile_bytes;
  }
  float& block_scale_at(int row, int col) const {
    return block_scale[size_t(row / kScaleBlock) * ceil_div(cols, kScaleBlock) + col / kScaleBlock];
  }
};

// Each strip ends with unused cache lines. If strips were a power of two apart, the lines that backward reads from many
// strips at once would share a few sets of the cache.
static inline int64_t weight_strip_bytes(Format format, int cols) {
  constexpr int64_t kPad = 256;
  return int64_t(ceil_div(cols, info(format).tile_cols)) * info(format).tile_bytes + kPad;
}

// The number of fp32 scales stored outside of the tiles.
static inline size_t scale_count(Format format, int rows, int cols) {
  if (info(format).row_scaled) return size_t(rows);
  if (info(format).block_scaled) return size_t(ceil_div(rows, kScaleBlock)) * ceil_div(cols, kScaleBlock);
  return 0;
}

}  // namespace ktft
