// Rows of several matrices that travel together, such as experts' blocks and their LoRA tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ktft {

// One matrix of many rows on one side (`all`), of which the chosen ones lie one after another on the other (`chosen`):
// all + rows[i] * all_stride <-> chosen + i * chosen_stride, `bytes` of each.
struct RowCopy {
  uintptr_t all, chosen;
  size_t bytes, all_stride, chosen_stride;
};

struct Piece {
  uintptr_t all, chosen;
  size_t bytes;
};

// What there is to copy, neighbouring rows together where nothing lies between them.
std::vector<Piece> pieces(const std::vector<int>& rows, const std::vector<RowCopy>& matrices);

// The same on the host, on up to `threads` threads, or on fewer where the system refuses them; `gather`: from all to
// chosen.
void copy_on_host(const std::vector<int>& rows, const std::vector<RowCopy>& matrices, bool gather, int threads);

}  // namespace ktft
