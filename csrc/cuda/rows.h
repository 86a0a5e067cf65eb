// Copies of the same rows of several matrices, such as experts' blocks and their LoRA tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ktft {

// A matrix on one side (`all`), and its chosen rows, one after another, on the other side (`chosen`). `bytes` of each
// row are copied between all + rows[i] * all_stride and chosen + i * chosen_stride.
struct RowCopy {
  uintptr_t all, chosen;
  size_t bytes, all_stride, chosen_stride;
};

struct Piece {
  uintptr_t all, chosen;
  size_t bytes;
};

// The copies to make. Neighbouring rows that are contiguous on both sides are one copy.
std::vector<Piece> pieces(const std::vector<int>& rows, const std::vector<RowCopy>& matrices);

// Makes these copies on the host with up to `threads` threads, or fewer if the system refuses them. With `gather`,
// copies go from all to chosen, otherwise from chosen to all.
void copy_on_host(const std::vector<int>& rows, const std::vector<RowCopy>& matrices, bool gather, int threads);

}  // namespace ktft
