// Which rows each expert works on. A route is (token, slot), numbered token * top_k + slot; routes sorted by expert
// are rows, so that one expert's inputs are contiguous.
#pragma once

#include <cstdint>
#include <vector>

namespace ktft {

struct RowChunk {  // rows of one expert
  int expert, begin, end;
};

struct Routes {
  int tokens = 0, top_k = 0, rows = 0;
  std::vector<int> active;     // experts with at least one row, ascending
  std::vector<int> offset;     // [experts + 1]: expert e owns rows [offset[e], offset[e + 1])
  std::vector<int> row_route;  // [rows]
  std::vector<int> route_row;  // [rows], its inverse
  std::vector<int> packed;     // [experts]: where expert e's rows begin when each expert has whole 32s of rows
  int packed_rows = 0;
  std::vector<RowChunk> chunks;  // every expert's rows, at most kChunkRows at a time

  static constexpr int kChunkRows = 64;
  int token(int row) const { return row_route[row] / top_k; }
};

// top_k_index: [tokens, top_k]. Throws when an index is outside [0, experts).
Routes route(const int64_t* top_k_index, int tokens, int top_k, int experts);

}  // namespace ktft
