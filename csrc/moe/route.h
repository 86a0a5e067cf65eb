// The rows that each expert works on. A route is a pair (token, slot) with the number token * top_k + slot. Rows are
// the routes sorted by expert; those to experts that are computed elsewhere have none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ktft {

struct RowChunk {  // rows of one expert
  int slot;        // index of the expert among the active ones
  int expert, begin, rows;
  int packed;  // its first row in buffers in which every expert's rows are padded to a multiple of kRowPad

  // At most `most` of these rows, from `at` on.
  RowChunk part(int at, int most) const {
    return {
        .slot = slot, .expert = expert, .begin = begin + at, .rows = std::min(most, rows - at), .packed = packed + at};
  }
};

constexpr int kElsewhere = -1;  // in place of an expert's or a row's number

struct Routes {
  int tokens = 0, top_k = 0, rows = 0;
  std::vector<int> active;     // experts with at least one row, ascending
  std::vector<int> row_route;  // [rows]
  std::vector<int> route_row;  // [tokens, top_k], its inverse, or kElsewhere
  int packed_rows = 0;
  std::vector<RowChunk> experts;  // every active expert's rows
  std::vector<RowChunk> calls;    // the same, at most kMaxTokens at a time
  std::vector<RowChunk> chunks;   // the same, at most kChunkRows at a time

  static constexpr int kChunkRows = 64;

  int token(int row) const { return row_route[row] / top_k; }
  // Whether this is the first of its token's slots that has a row.
  bool leads(int row) const;
};

// top_k_index is [tokens, top_k]. Throws if an index is neither in [0, experts) nor kElsewhere.
Routes route(const int64_t* top_k_index, int tokens, int top_k, int experts);

}  // namespace ktft
