// Copies of the same rows of several matrices, such as experts' blocks and their LoRA tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ktft {

// `bytes` of each chosen row of a matrix, between all + rows[i] * all_stride and chosen + i * chosen_stride.
struct RowCopy {
  uintptr_t all, chosen;
  size_t bytes, all_stride = 0, chosen_stride = 0;
};

struct Piece {
  uintptr_t all, chosen;
  size_t bytes;
};

// The copies to make. Neighbouring rows that are contiguous on both sides are one copy.
std::vector<Piece> pieces(const std::vector<int>& rows, const std::vector<RowCopy>& matrices);

// Makes these copies on the host, from chosen to all or, with `gather`, from all to chosen. Uses up to `threads`
// threads, fewer if the system refuses them.
void copy_on_host(const std::vector<int>& rows, const std::vector<RowCopy>& matrices, bool gather, int threads);

}  // namespace ktft
