// LoRA on every expert: y += scaling * B (A drop(x)), in fp32, and its gradients.
//
// The long products run beside the base GEMMs, block by block; what is here are the blocks' building parts. Gradient
// buffers are written for experts that saw tokens and left alone (zero) for the others.
#pragma once

#include <optional>

#include "moe/route.h"
#include "moe/workspace.h"

namespace ktft {

struct LoraMatrix {  // [experts, rows, cols], contiguous
  const void* data;
  Dtype dtype;  // fp32 or bf16
  int rows, cols;
};

struct LoraPair {
  LoraMatrix a, b;  // a [experts, r, in], b [experts, out, r]
  float scaling;
  float* grad_a = nullptr;  // fp32, shapes of a and b; null in forward
  float* grad_b = nullptr;

  int rank() const { return a.rows; }
};

struct Lora {
  std::optional<LoraPair> pairs[kProjections];
  float dropout = 0;
  uint64_t seed = 0;

  const LoraPair* pair(Projection p) const { return pairs[int(p)] ? &*pairs[int(p)] : nullptr; }
  int max_rank() const;
  bool drops() const { return dropout > 0; }
  // The dropout stream of one route's input to one projection.
  uint64_t key(Projection p, int route) const;
};

// fp32 copy of rows [row, row + rows) x columns [col, col + cols) of one expert's matrix, row stride ld.
void load_block(const VectorKernels& vec, const LoraMatrix& m, int expert, int row, int rows, int col, int cols,
                float* out, int64_t ld);
// The same, transposed: out is [cols, rows].
void load_transposed(const LoraMatrix& m, int expert, int row, int rows, int col, int cols, float* out, int64_t ld);

// bf16 rows of inputs as fp32, with this projection's dropout when `p` is given. x points at column `col` of row
// `row`; elements are numbered from `col` + `first` (a slice of the intermediate dimension starts at `first`).
void load_rows(const VectorKernels& vec, const Routes& routes, const Lora& lora, const Projection* p, const bf16* x,
               int64_t ldx, int row, int rows, int col, int cols, int first, float* out, int64_t ld);

// out[row, :] = M x[row, :] for the rows of one chunk, M = the r x width matrix A[:, first..) when `transposed` is
// false, B[first.., :]^T when it is true. x is [rows, width] bf16.
struct LowRankJob {
  const LoraMatrix* matrix;
  bool transposed;
  const Projection* dropout;  // whose dropout applies to x, or null
  const bf16* x;
  int width, first;
  float* out;  // [rows, r]
};
void low_rank(const VectorKernels& vec, const Routes& routes, const Lora& lora, const LowRankJob& job,
              const RowChunk& chunk, Scratch& scratch);

// Bytes of scratch that the blocks of a call need.
size_t lora_scratch(const Lora* lora);

}  // namespace ktft
