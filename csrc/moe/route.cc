#include "moe/route.h"

#include "base/check.h"
#include "kernels/kernels.h"

namespace ktft {
namespace {

// Cuts experts' rows into parts of at most `most` rows, of similar lengths within an expert: a short last part would
// read the expert's weights for only a few rows.
std::vector<RowChunk> cut(const std::vector<RowChunk>& experts, int most) {
  std::vector<RowChunk> out;
  for (const RowChunk& e : experts) {
    const int parts = ceil_div(e.rows, most), rows = pad_rows(ceil_div(e.rows, parts));
    for (int at = 0; at < e.rows; at += rows) out.push_back(e.part(at, rows));
  }
  return out;
}

}  // namespace

bool Routes::leads(int row) const {
  for (int route = row_route[row]; route % top_k; route--)
    if (route_row[route - 1] != kElsewhere) return false;
  return true;
}

Routes route(const int64_t* top_k_index, int tokens, int top_k, int experts) {
  static_assert(Routes::kChunkRows % kRowPad == 0 && kMaxTokens % kRowPad == 0);
  Routes r;
  r.tokens = tokens;
  r.top_k = top_k;
  KTFT_CHECK(int64_t(tokens) * top_k <= INT32_MAX, tokens, " tokens with ", top_k,
             " experts each are too many for one call: make batches smaller");
  const int routes = tokens * top_k;
  std::vector<int> next(size_t(experts) + 1, 0);
  for (int i = 0; i < routes; i++) {
    const int64_t expert = top_k_index[i];
    if (expert == kElsewhere) continue;
    KTFT_CHECK(expert >= 0 && expert < experts, "token ", i / top_k, " is routed to expert ", expert,
               ", but the layer's experts are 0 to ", experts - 1);
    next[size_t(expert) + 1]++;
    r.rows++;
  }
  for (int e = 0; e < experts; e++) {
    const int rows = next[size_t(e) + 1];
    next[size_t(e) + 1] += next[e];
    if (!rows) continue;
    r.experts.push_back(
        {.slot = int(r.active.size()), .expert = e, .begin = next[e], .rows = rows, .packed = r.packed_rows});
    r.active.push_back(e);
    r.packed_rows += pad_rows(rows);
  }
  r.row_route.resize(r.rows);
  r.route_row.resize(routes, kElsewhere);
  for (int i = 0; i < routes; i++) {
    if (top_k_index[i] == kElsewhere) continue;
    const int row = next[top_k_index[i]]++;
    r.row_route[row] = i;
    r.route_row[i] = row;
  }
  r.calls = cut(r.experts, kMaxTokens);
  r.chunks = cut(r.experts, Routes::kChunkRows);
  return r;
}

}  // namespace ktft
