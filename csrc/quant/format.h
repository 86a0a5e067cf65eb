// How one weight matrix W [rows, cols] lies in memory.
//
// Tiles of 16 rows x 64 bytes, row-major inside (1 KB each); the tiles of one 16-row strip follow each other along the
// columns, strips follow each other. 64 bytes hold `tile_cols` columns. Columns are padded with zeros to a whole tile,
// rows are a multiple of 16. One copy serves both passes: forward reads a tile's rows as they are, backward pairs rows
// while decoding.
#pragma once

#include <cstddef>

#include "base/types.h"

namespace ktft {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 1024;
constexpr int kRowBytes = 64;
constexpr int kDimMultiple = 32;  // hidden and intermediate sizes: one tile of bf16 columns, two tiles of rows

struct FormatInfo {
  const char* name;
  int tile_cols;    // columns in one tile
  bool row_scaled;  // W = diag(scale) * Q, one fp32 scale a row
};

constexpr FormatInfo kFormatInfo[kFormats] = {{"bf16", 32, false}, {"int8", 64, true}};

constexpr const FormatInfo& info(Format format) { return kFormatInfo[int(format)]; }

struct PackedMatrix {
  Format format;
  int rows, cols;
  uint8_t* tiles;
  float* row_scale;  // [rows], or null when the format has none

  int col_tiles() const { return (cols + info(format).tile_cols - 1) / info(format).tile_cols; }
  uint8_t* tile(int row_tile, int col_tile) const {
    return tiles + (size_t(row_tile) * col_tiles() + col_tile) * kTileBytes;
  }
};

static inline size_t tile_bytes(Format format, int rows, int cols) {
  return size_t(rows / kTileRows) * ((cols + info(format).tile_cols - 1) / info(format).tile_cols) * kTileBytes;
}

}  // namespace ktft
