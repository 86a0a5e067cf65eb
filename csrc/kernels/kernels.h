// The kernel table: every kernel ktft can run, found by (ISA, format, pass). Dispatch, tests and benchmarks read it.
#pragma once

#include <limits>
#include <vector>

#include "quant/format.h"

namespace ktft {

// A GEMM call computes at most so many outputs (rows of W forward, columns backward) for at most so many tokens: as
// many as its operands and results fit in an L2 of 2 MB, so that memory is read seldom.
constexpr int kMaxOutputs = 256;
constexpr int kMaxTokens = 704;
// Rows of W forward (columns backward) are decoded this many reduction elements at a time; the block stays in L2.
constexpr int kReductionBlock = 1024;

// Activations lie like packed bf16 weights: strips of 16 rows, each a row of pieces of 16 x 32. A row count is rounded
// up to whole kRowPad rows. So a gradient's GEMM can take activations as its W.
// The forward GEMM's X is a pack_forward: with `turned` each piece is transposed, as 16 x 16 pairs of columns.
constexpr int kRowPad = 32;
static constexpr int pad_rows(int rows) { return (rows + kRowPad - 1) / kRowPad * kRowPad; }

// Strips end with two unused pieces, so that tokens of one column do not fall into few sets of a cache.
constexpr int kStripPad = 64;
static constexpr int64_t strip_elements(int cols) { return int64_t(cols + kStripPad) * kTileRows; }
// Elements of `rows` rows, whole strips: also where row number `rows` begins.
static constexpr size_t activation_elements(int64_t rows, int cols) {
  return size_t(rows / kTileRows * strip_elements(cols));
}
static inline PackedMatrix activation_matrix(bf16* pieces, int rows, int cols) {
  return {Format::kBf16, rows, cols, reinterpret_cast<uint8_t*>(pieces), nullptr, nullptr, 2 * strip_elements(cols)};
}

// Of a call with at most kFewRows tokens, tile ISAs read rows, not columns: the unused second strip of such an X holds
// them once more, as rows of its pieces, not turned. Whoever writes a turned X for the layer's weights writes both.
constexpr int kFewRows = 4;
// Tokens up to which a format's rows are read: as many as are faster so, as measured.
constexpr int kMostDotTokens[kFormats] = {0, 2, 2, 4, 4, 4};
static inline void place_few_row(const bf16* row, int index, int cols, bf16* x) {
  bf16* at = x + strip_elements(cols) + index * 32;
  for (int c = 0; c < cols; c += 32, at += kPieceElements) std::memcpy(at, row + c, 32 * sizeof(bf16));
}

// Results lie in fp32 pieces of 16 tokens x 32 outputs, panel (32 outputs) by panel; `turned` forward results are
// transposed within a piece.
constexpr int kResultPiece = 512;
static constexpr int64_t result_piece(int panel, int strip, int tokens) {
  return (int64_t(panel) * (pad_rows(tokens) / kTileRows) + strip) * kResultPiece;
}

// One product, without W's row scales: W = diag(row_scale) Q.
//   forward:   C[t, j] = sum_i X[t, i] Q[out_begin + j, i]  + sum_r L[t, r] M[lora_begin + j, r]
//   backward:  C[t, j] = sum_i X[t, i] Q[i, out_begin + j]  + sum_r L[t, r] M[r, lora_begin + j]
struct GemmTerm {
  const PackedMatrix* w;
  int out_begin;
  const bf16* x;             // rows of w->cols elements forward, w->rows backward
  const PackedMatrix* lora;  // M, bf16, at most kMaxTokens reduction elements; or null
  int lora_begin;
  const bf16* low_rank;  // L, laid out as x is
  float* c;
};

struct GemmArgs {
  GemmTerm terms[2];
  int count;      // forward: products of one X with results of their own; backward: products that add up in the first c
  int out_count;  // of each term, a multiple of 32; all terms' results together are at most kMaxOutputs forward
  int tokens;     // X and L have readable rows up to the next multiple of kRowPad, which do not count
  char* scratch;  // kGemmScratch bytes, 64-byte aligned
};
// Decoded panels and spare pieces.
constexpr size_t kGemmScratch = size_t(kReductionBlock + 2 * kMaxTokens) * 64 * sizeof(bf16);

// Whether a tile ISA's forward call reads rows of X, and nothing of the turned X: they lie in the scratch memory, in at
// most three bytes a value and whole 128 columns, beside `low_rank` elements each and decoded pieces of W.
constexpr int kDotPieces = 16;  // of a strip, decoded at a time: 16 KB of L1
static constexpr bool reads_rows(Format format, int tokens, int cols, int low_rank) {
  const int64_t row = int64_t(ceil_div(cols, 128)) * 128 * 3 + low_rank * int64_t(sizeof(bf16));
  return tokens <= kMostDotTokens[int(format)] &&
         kDotPieces * kPieceElements * 2 + tokens * row <= int64_t(kGemmScratch);
}

struct GemmKernel {
  Isa isa;
  Format format;
  Pass pass;
  const char* name;
  void (*run)(const GemmArgs&);
};

// What a product's outputs become: scale * c + bias, output by output.
struct Affine {
  const float *scale, *bias;  // [cols], or null: ones, zeros
};
static inline Affine affine_at(const Affine& out, int col) {
  return {out.scale ? out.scale + col : nullptr, out.bias ? out.bias + col : nullptr};
}
static inline Affine affine_at(const PackedMatrix& w, int row) { return affine_at(Affine{w.row_scale, w.bias}, row); }

// The activation between gate, up and down, of clamped arguments:
//   h = g sigmoid(alpha g) (u + shift),  g = min(gate, limit), u = max(min(up, limit), -limit)
// SiLU(gate) up has alpha 1, no limit and no shift; gpt-oss has 1.702, 7 and 1.
struct Swiglu {
  float alpha = 1, limit = std::numeric_limits<float>::infinity(), shift = 0;
};

// gate and up: two results of one forward call. h becomes the down projection's X.
struct SwigluArgs {
  Swiglu function;
  int tokens, cols;
  const float *gate, *up;  // results
  Affine gate_out, up_out;
  bf16* h;                      // the first strip's first piece, in pack_forward's layout
  bf16 *saved_gate, *saved_up;  // before clamping, in rows' layout, for swiglu_backward; or null
  int64_t strip;                // elements from strip to strip of the three
};

// From dh (a backward result, before the routing weight w): dgate, dup = w dh (dh / d gate, up), times the rows' scales
// of gate and up; h. Rows after the last token become zeros. <dh, h> is given in parts of kDotCols columns, so that its
// sum does not depend on how columns are cut into calls.
constexpr int kDotCols = 64;
struct SwigluBackwardArgs {
  Swiglu function;
  int tokens, cols;
  const float* dh;
  const bf16 *gate, *up;
  const float *gate_scale, *up_scale;  // [cols], or null
  const float* weights;                // [tokens]
  bf16 *dgate, *dup, *h;               // h may be null
  int64_t strip;
  float* weight_grads;  // [ceil(cols / kDotCols), tokens], row stride below
  int64_t weight_grads_stride;
};

// W8A8, where there are tiles with int8 products: activations are scale * q, one scale a row, q in [-127, 127].
// Rows lie in strips of 16 as a B operand: 1 KB tiles of 64 columns, row i of a tile holds columns 4i to 4i + 3 of
// every token. Columns are padded with zeros to whole tiles; strips end with two unused tiles, as those of bf16 do.
struct Int8Rows {
  int8_t* codes;
  float* scales;
};
constexpr int kInt8TileCols = info(Format::kInt8).tile_cols;
constexpr int kMaxInt8Reduction = INT32_MAX / (127 * 127);  // sums are exact in int32
static constexpr int64_t int8_strip_bytes(int cols) {
  return int64_t(ceil_div(cols, kInt8TileCols) + 2) * kInt8TileCols * kTileRows;
}
static inline Int8Rows int8_rows_at(const Int8Rows& rows, int row, int cols) {
  return {rows.codes + row / kTileRows * int8_strip_bytes(cols), rows.scales + row};
}

// C[t, j] = scale[t] sum_i q[t, i] Q[out_begin + j, i]  + add[t, j]: results as a forward GEMM's.
struct Int8GemmArgs {
  GemmArgs gemm;  // but for the terms' x and LoRA
  Int8Rows x;
  const float* add[2];  // to each term, laid out as its c is; or null
};

struct Int8Kernels {
  void (*quantize)(const bf16* strip, int cols, int8_t* codes, float* scales);  // a strip as pack_forward makes it
  void (*gemm)(const Int8GemmArgs&);
};

// AdamW's scalars at step t, computed in double:
//   m = m + first_weight (g - m),  v = beta2 v + second_weight g^2
//   p = decay p - size m / (root_scale sqrt(v) + eps)
// first_weight = 1 - beta1, second_weight = 1 - beta2, root_scale = 1 / sqrt(1 - beta2^t), size = lr / (1 - beta1^t),
// decay = 1 - lr weight_decay. p, m and v are updated in place, in fp32; of bf16 each result is rounded once.
struct AdamStep {
  float decay, first_weight, beta2, second_weight, root_scale, eps, size;
};
template <class T>
using AdamKernel = void (*)(int64_t n, const AdamStep& step, const T* grad, T* param, T* exp_avg, T* exp_avg_sq);

// What is not a GEMM. n and cols are multiples of 16, but for adam's n.
struct VectorKernels {
  bool turned;  // see above
  // Sixteen rows (null: zeros) -> a strip of pieces; pack_forward as the forward GEMM takes them.
  void (*pack_rows)(const bf16* const* rows, int cols, bf16* out);
  void (*pack_forward)(const bf16* const* rows, int cols, bf16* out);
  void (*unturn)(int pieces, float* c);  // forward results -> 16 x 32, row-major, in place
  void (*swiglu)(const SwigluArgs&);
  void (*swiglu_backward)(const SwigluBackwardArgs&);
  // y[t, j] = c[t, j] * scale[j] + bias[j], row-major
  void (*store_rows)(Pass pass, int tokens, int cols, const float* c, const Affine& out, bf16* y, int64_t ldy);
  bool (*finite)(int n, const bf16* x);
  void (*widen)(int n, const bf16* x, float* y);
  void (*narrow)(int n, const float* x, bf16* y);
  void (*scale_row)(int n, const bf16* x, const float* scale, bf16* y);       // y = x * scale
  void (*split)(int n, const float* x, float factor, bf16* high, bf16* low);  // high + low = x * factor
  float (*dot)(int n, const bf16* x, const float* y);
  void (*weighted_sum)(int n, int rows, const bf16* const* x, const float* weights, float* y);
  // Bit i: whether element first + i of the stream `key` stays, which it does with 1 - probability.
  uint32_t (*dropout_mask)(uint64_t key, uint32_t first, float probability);
  AdamKernel<float> adam_f32;
  AdamKernel<bf16> adam_bf16;
};

// Loops for the benchmark's ceilings. Each runs some microseconds (emulated tiles: up to 0.1 s) on kRateMemory
// bytes that fill() wrote, 64-byte aligned, and returns the FLOPs it did.
struct RateKernels {
  void (*fill)(char* memory);
  int64_t (*registers)(const char* memory);  // products of registers only
  int64_t (*hot)(char* memory);              // the forward GEMM's inner loop, operands in L1 and L2
};
constexpr size_t kRateMemory = size_t(256) << 10;

const std::vector<GemmKernel>& gemm_table();
const GemmKernel& find_gemm(Isa isa, Format format, Pass pass);
const VectorKernels& vector_kernels(Isa isa);
const RateKernels& rate_kernels(Isa isa);
const Int8Kernels* int8_kernels(Isa isa);  // null where there are none

}  // namespace ktft
