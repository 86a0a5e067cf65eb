#include "moe/lora.h"

#include <algorithm>

namespace ktft {
namespace {

constexpr int kDepth = 256;  // reduction elements of a low-rank product at a time

const float* f32(const LoraMatrix& m, int expert) {
  return static_cast<const float*>(m.data) + size_t(expert) * m.rows * m.cols;
}
const bf16* half(const LoraMatrix& m, int expert) {
  return static_cast<const bf16*>(m.data) + size_t(expert) * m.rows * m.cols;
}

uint64_t mix(uint64_t z) {  // splitmix64's finalizer
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

}  // namespace

int Lora::max_rank() const {
  int rank = 0;
  for (const auto& pair : pairs)
    if (pair) rank = std::max(rank, pair->rank());
  return rank;
}

uint64_t Lora::key(Projection p, int route) const {
  return mix(mix(seed + 0x9e3779b97f4a7c15ull * (uint64_t(p) + 1)) + uint64_t(route));
}

void load_block(const VectorKernels& vec, const LoraMatrix& m, int expert, int row, int rows, int col, int cols,
                float* out, int64_t ld) {
  for (int r = 0; r < rows; r++) {
    const size_t at = size_t(row + r) * m.cols + col;
    if (m.dtype == Dtype::kF32)
      std::memcpy(out + r * ld, f32(m, expert) + at, size_t(cols) * 4);
    else
      vec.widen(cols, half(m, expert) + at, out + r * ld);
  }
}

void load_transposed(const LoraMatrix& m, int expert, int row, int rows, int col, int cols, float* out, int64_t ld) {
  for (int r = 0; r < rows; r++) {
    const size_t at = size_t(row + r) * m.cols + col;
    for (int c = 0; c < cols; c++)
      out[c * ld + r] = m.dtype == Dtype::kF32 ? f32(m, expert)[at + c] : to_float(half(m, expert)[at + c]);
  }
}

void load_rows(const VectorKernels& vec, const Routes& routes, const Lora& lora, const Projection* p, const bf16* x,
               int64_t ldx, int row, int rows, int col, int cols, int first, float* out, int64_t ld) {
  for (int r = 0; r < rows; r++) {
    vec.widen(cols, x + r * ldx, out + r * ld);
    if (p && lora.drops())
      vec.dropout(cols, out + r * ld, lora.key(*p, routes.row_route[row + r]), uint32_t(first + col), lora.dropout);
  }
}

void low_rank(const VectorKernels& vec, const Routes& routes, const Lora& lora, const LowRankJob& job,
              const RowChunk& chunk, Scratch& scratch) {
  const int rows = chunk.end - chunk.begin, rank = job.transposed ? job.matrix->cols : job.matrix->rows;
  float* const x = scratch.take<float>(size_t(Routes::kChunkRows) * kDepth);
  float* const m = scratch.take<float>(size_t(rank) * kDepth);
  float* const out = job.out + size_t(chunk.begin) * rank;
  std::fill(out, out + size_t(rows) * rank, 0.f);
  for (int col = 0; col < job.width; col += kDepth) {
    const int depth = std::min(kDepth, job.width - col);
    load_rows(vec, routes, lora, job.dropout, job.x + size_t(chunk.begin) * job.width + col, job.width, chunk.begin,
              rows, col, depth, job.first, x, kDepth);
    if (job.transposed)
      load_transposed(*job.matrix, chunk.expert, job.first + col, depth, 0, rank, m, kDepth);
    else
      load_block(vec, *job.matrix, chunk.expert, 0, rank, job.first + col, depth, m, kDepth);
    vec.gemm_nt(rows, rank, depth, x, kDepth, m, kDepth, out, rank, 1.f);
  }
}

size_t lora_scratch(const Lora* lora) {
  if (!lora) return 0;
  const size_t rank = size_t(lora->max_rank());
  return (Routes::kChunkRows * kDepth + rank * kDepth + 4096) * sizeof(float);
}

}  // namespace ktft
