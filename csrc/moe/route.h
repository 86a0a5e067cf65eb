// Which rows each expert works on. A route is (token, slot), numbered token * top_k + slot; routes sorted by expert
// are rows, so that one expert's inputs are contiguous. Routes of experts that are computed elsewhere have no row.
#pragma once

#include <cstdint>
#include <vector>

namespace ktft {

struct RowChunk {  // rows of one expert
  int slot;        // the expert's place among the active ones
  int expert, begin, rows;
  int packed;  // where its rows lie in buffers in which every expert has whole kRowPad rows
};

constexpr int kElsewhere = -1;  // an expert's number, or a row's

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
  // Whether no earlier slot of its token has a row.
  bool leads(int row) const;
};

// top_k_index: [tokens, top_k]. Throws when an index is outside [0, experts) and not kElsewhere.
Routes route(const int64_t* top_k_index, int tokens, int top_k, int experts);

}  // namespace ktft
