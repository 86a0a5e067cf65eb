#include "dense/weight.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "numa/buffer.h"
#include "quant/pack.h"

namespace ktft {
namespace {

constexpr int kPerThread = 4;  // tasks of a product

PackedMatrix dense_matrix(Format format, int rows, int cols, void* packed) {
  const int64_t strip_bytes = weight_strip_bytes(format, cols);
  uint8_t* const tiles = static_cast<uint8_t*>(packed);
  float* const scales = reinterpret_cast<float*>(tiles + rows / kTileRows * strip_bytes);
  PackedMatrix matrix{.format = format, .rows = rows, .cols = cols, .tiles = tiles, .strip_bytes = strip_bytes};
  if (info(format).row_scaled) matrix.row_scale = scales;
  if (info(format).block_scaled) matrix.block_scale = scales;
  return matrix;
}

// Packs one strip of up to 16 rows of x for the forward GEMM. `tokens` are those of the whole GEMM call.
void pack_strip(const VectorKernels& vec, const bf16* x, int rows, int tokens, int cols, bf16* out) {
  const bf16* at[kTileRows] = {};
  for (int r = 0; r < rows; r++) at[r] = x + size_t(r) * cols;
  vec.pack_forward(at, cols, out);
  if (vec.turned && tokens <= kFewRows)
    for (int r = 0; r < rows; r++) place_few_row(at[r], r, cols, out);
}

// Products of a few tokens: rows are prepared once, and a task reads a long run of W.
void product_of_few(Runtime& runtime, const StripKernels& kernels, const PackedMatrix& w, const Affine& out,
                    int activation_bits, const bf16* x, int tokens, bf16* y) {
  const int64_t row_bytes = kernels.row_bytes(w.cols);
  char* const placed = runtime.dense_rows.get<char>(size_t(tokens * row_bytes));
  runtime.pool.run(tokens, [&](int t, int) {
    kernels.place(x + size_t(t) * w.cols, w.cols, activation_bits, placed + t * row_bytes);
  });
  const int strips = w.rows / kTileRows, block = ceil_div(strips, kPerThread * runtime.pool.threads());
  const VectorKernels& vec = runtime.vec();
  runtime.pool.run(ceil_div(strips, block), [&](int task, int) {
    const void* rows[kStripRows];
    for (int t = 0; t < tokens; t++) rows[t] = placed + t * row_bytes;
    for (int strip = task * block; strip < std::min((task + 1) * block, strips); strip++) {
      alignas(64) float results[kStripRows * kTileRows];
      const uint8_t* const next = strip + 1 < strips ? w.tile(strip + 1, 0) : nullptr;
      kernels.product({&w, strip, rows, tokens, next, results, activation_bits});
      const Affine affine = affine_at(out, strip * kTileRows);
      for (int t = 0; t < tokens; t++) {
        float* const values = results + t * kTileRows;
        apply_affine(affine, kTileRows, values);
        vec.narrow(kTileRows, values, y + size_t(t) * w.rows + strip * kTileRows);
      }
    }
  });
}

// Outputs of one GEMM call: as many as leave several calls for every thread.
int block_of(int rows, int threads) {
  constexpr int kLeast = 32;
  int block = kMaxOutputs;
  while (block > kLeast && ceil_div(rows, block) < kPerThread * threads) block /= 2;
  return block;
}

}  // namespace

size_t dense_bytes(Format format, int rows, int cols) {
  return size_t(rows / kTileRows) * weight_strip_bytes(format, cols) + scale_count(format, rows, cols) * sizeof(float);
}

bool pack_dense(Pool& pool, Format format, const SourceMatrix& source, void* out) {
  const int rows = source.rows, cols = source.cols;
  KTFT_CHECK(rows % kTileRows == 0 && cols % kDimMultiple == 0, "[", rows, ", ", cols, "] is not [a multiple of ",
             kTileRows, ", a multiple of ", kDimMultiple, "]");
  PackedMatrix matrix = dense_matrix(format, rows, cols, out);
  const bool keep = keeps(source, format);
  prefer_huge_pages(out, dense_bytes(format, rows, cols));
  // The bytes behind each strip are copied and compared with the rest
  std::memset(out, 0, dense_bytes(format, rows, cols));
  FirstBad bad;
  pool.run(ceil_div(rows, pack_rows(format)),
           [&](int unit, int) { bad.note(pack(source, 0, 0, matrix, unit, keep), cols); });
  bad.refuse(cols);
  collapse_huge_pages(out, dense_bytes(format, rows, cols));
  return keep;
}

void DenseWeight::product(Runtime& runtime, const bf16* x, int tokens, bool biased, bf16* y) const {
  KTFT_CHECK(rows % kRowPad == 0, "[", rows, ", ", cols, "]: the rows are no multiple of ", kRowPad);
  const ForkLock lock(runtime.mutex);
  const PackedMatrix w = dense_matrix(format, rows, cols, const_cast<void*>(packed));
  const VectorKernels& vec = runtime.vec();
  const StripKernels& strips_of = strip_kernels(runtime.isa, format);
  if (tokens <= std::min(kStripRows, strips_of.most(activation_bits)))
    return product_of_few(runtime, strips_of, w, {w.row_scale, biased ? bias : nullptr}, activation_bits, x, tokens, y);
  const Gemm gemm = find_gemm(runtime.isa, format, Pass::kForward);
  const int block = block_of(rows, runtime.pool.threads()), most = std::min(tokens, kMaxTokens);
  for (Scratch& scratch : runtime.scratch)
    scratch.reserve(in_lines(size_t(pad_rows(most)) * block * sizeof(float)) + kGemmScratch);
  bf16* const in = runtime.dense_rows.get<bf16>(activation_elements(pad_rows(most), cols) * sizeof(bf16));
  for (int begin = 0; begin < tokens; begin += kMaxTokens) {
    const int count = std::min(kMaxTokens, tokens - begin), strips = ceil_div(count, kTileRows);
    const bf16* const from = x + size_t(begin) * cols;
    const auto pack_one = [&](int strip, int) {
      const int first = strip * kTileRows;
      pack_strip(vec, from + size_t(first) * cols, std::min(kTileRows, count - first), count, cols,
                 in + activation_elements(first, cols));
    };
    if (strips == 1)
      pack_one(0, 0);
    else
      runtime.pool.run(strips, pack_one);
    runtime.pool.run(ceil_div(rows, block), [&](int task, int thread) {
      Scratch& scratch = runtime.scratch[thread];
      scratch.reset();
      const int out = task * block, outputs = std::min(block, rows - out);
      float* const c = scratch.take<float>(size_t(pad_rows(count)) * outputs);
      gemm({.terms = {{.w = &w, .out_begin = out, .x = in, .c = c}},
            .out_count = outputs,
            .tokens = count,
            .scratch = scratch.take<char>(kGemmScratch),
            .activation_bits = activation_bits});
      vec.store_rows(Pass::kForward, count, outputs, c, affine_at(Affine{w.row_scale, biased ? bias : nullptr}, out),
                     y + size_t(begin) * rows + out, rows);
    });
  }
}

}  // namespace ktft
