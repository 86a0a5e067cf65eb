#include "moe/route.h"

#include <algorithm>

#include "base/check.h"

namespace ktft {

Routes route(const int64_t* top_k_index, int tokens, int top_k, int experts) {
  Routes r;
  r.tokens = tokens;
  r.top_k = top_k;
  r.rows = tokens * top_k;
  r.offset.assign(size_t(experts) + 1, 0);
  for (int i = 0; i < r.rows; i++) {
    const int64_t expert = top_k_index[i];
    KTFT_CHECK(expert >= 0 && expert < experts, "token ", i / top_k, " is routed to expert ", expert,
               ", but the layer's experts are 0 to ", experts - 1);
    r.offset[size_t(expert) + 1]++;
  }
  for (int e = 0; e < experts; e++) {
    if (r.offset[size_t(e) + 1]) r.active.push_back(e);
    r.offset[size_t(e) + 1] += r.offset[e];
  }
  r.packed.assign(size_t(experts), 0);
  for (int e : r.active) {
    r.packed[e] = r.packed_rows;
    r.packed_rows += (r.offset[size_t(e) + 1] - r.offset[e] + 31) / 32 * 32;
  }
  std::vector<int> next(r.offset.begin(), r.offset.end() - 1);
  r.row_route.resize(r.rows);
  r.route_row.resize(r.rows);
  for (int i = 0; i < r.rows; i++) {
    const int row = next[top_k_index[i]]++;
    r.row_route[row] = i;
    r.route_row[i] = row;
  }
  for (int e : r.active)
    for (int at = r.offset[e]; at < r.offset[e + 1]; at += Routes::kChunkRows)
      r.chunks.push_back({e, at, std::min(at + Routes::kChunkRows, r.offset[e + 1])});
  return r;
}

}  // namespace ktft
