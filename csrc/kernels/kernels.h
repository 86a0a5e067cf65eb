// What kernels are given, and the table of them: a GEMM for each ISA, format and pass, and each ISA's other kernels.
#pragma once

#include <limits>

#include "quant/format.h"

namespace ktft {

// Limits of one GEMM call, as large as they can be while operands and results fit in an L2 cache of 2 MB.
constexpr int kMaxOutputs = 256;  // rows of W in forward, columns in backward
constexpr int kMaxTokens = 704;
constexpr int kReductionBlock = 1024;  // W is decoded this many reduction elements at a time, and they stay in L2

// Activations have the layout of packed bf16 weights, so that a gradient's GEMM can take them as its W: strips of 16
// rows, each a sequence of 16 x 32 pieces. The number of rows is rounded up to a multiple of kRowPad.
// The forward GEMM reads the layout that pack_forward writes. Where VectorKernels::turned is set, each piece in it is
// transposed, as 16 x 16 pairs of columns.
constexpr int kRowPad = 32;
static constexpr int pad_rows(int rows) { return (rows + kRowPad - 1) / kRowPad * kRowPad; }

// Each strip ends with two unused pieces. Without them, the tokens of one column would share a few sets of the cache.
constexpr int kStripPad = 64;
static constexpr int64_t strip_elements(int cols) { return int64_t(cols + kStripPad) * kTileRows; }
// The number of elements in `rows` rows, a multiple of 16. This is also the offset at which row `rows` begins.
static constexpr size_t activation_elements(int64_t rows, int cols) {
  return size_t(rows / kTileRows * strip_elements(cols));
}
static inline PackedMatrix bf16_matrix(bf16* pieces, int rows, int cols, int64_t strip) {
  return {.format = Format::kBf16,
          .rows = rows,
          .cols = cols,
          .tiles = reinterpret_cast<uint8_t*>(pieces),
          .strip_bytes = int64_t(sizeof(bf16)) * strip};
}

// In a call with at most kFewRows tokens, tile ISAs read X by rows instead of by transposed pieces. They are in the
// second strip of such an X, otherwise padding: code that writes a transposed X for the layer's weights writes both.
constexpr int kFewRows = 4;
static inline void place_few_row(const bf16* row, int index, int cols, bf16* x) {
  bf16* at = x + strip_elements(cols) + index * 32;
  for (int c = 0; c < cols; c += 32, at += kPieceElements) std::memcpy(at, row + c, 32 * sizeof(bf16));
}

// Results are fp32 pieces of 16 tokens x 32 outputs, ordered by panel (32 outputs). Where VectorKernels::turned is set,
// forward results are transposed within each piece.
constexpr int kResultPiece = 512;
static constexpr int64_t result_piece(int panel, int strip, int tokens) {
  return (int64_t(panel) * (pad_rows(tokens) / kTileRows) + strip) * kResultPiece;
}

// One product, without W's row scales: W = diag(row_scale) Q.
//   forward:   C[t, j] = sum_i X[t, i] Q[out_begin + j, i]  + sum_r L[t, r] M[lora_begin + j, r]
//   backward:  C[t, j] = sum_i X[t, i] Q[i, out_begin + j]  + sum_r L[t, r] M[r, lora_begin + j]
struct GemmTerm {
  const PackedMatrix* w = nullptr;
  int out_begin = 0;
  const bf16* x = nullptr;             // rows of w->cols elements in forward, of w->rows in backward
  const PackedMatrix* lora = nullptr;  // M, bf16, with at most kMaxTokens reduction elements; or null
  int lora_begin = 0;
  const bf16* low_rank = nullptr;  // L, in the layout of x
  float* c = nullptr;
};

struct GemmArgs {
  GemmTerm terms[2];
  int count = 1;  // forward: terms share X and have results of their own; backward: terms add up in the first one's c
  int out_count;  // outputs of each term, a multiple of 32; in forward, all terms together have at most kMaxOutputs
  int tokens;     // X and L must be readable up to the next multiple of kRowPad; the padding rows are ignored
  char* scratch;  // kGemmScratch bytes, 64-byte aligned
  int activation_bits = 16;       // 8: forward products of codes round X to int8, where StripKernels::bytes says so
  const uint8_t* next = nullptr;  // the strip of weights that this thread reads after those of the call; or null
};
// Holds decoded panels and spare pieces.
constexpr size_t kGemmScratch = size_t(kReductionBlock + 2 * kMaxTokens) * 64 * sizeof(bf16);

// The most tokens for which vector ISAs multiply codes (kernels/code_dots-inl.h) instead of decoding them.
constexpr int kMostDots = 12;

// Whether a forward call of at most `most` tokens reads only the rows of X. They must fit in the scratch memory, at up
// to four bytes a value in 128 columns, with `low_rank` elements each and the decoded pieces of W.
constexpr int kDotPieces = 16;  // pieces of a strip decoded at a time: 16 KB of L1
static constexpr bool reads_rows(int most, int tokens, int cols, int low_rank) {
  const int64_t row = int64_t(ceil_div(cols, 128)) * 128 * 4 + low_rank * int64_t(sizeof(bf16));
  return tokens <= most && kDotPieces * kPieceElements * 2 + tokens * row + kCacheLine <= int64_t(kGemmScratch);
}

using Gemm = void (*)(const GemmArgs&);

// The product of 16 outputs, a strip of W, with at most kStripRows rows of X:
//   results[t, r] = sum_i W[16 strip + r, i] rows[t][i], without W's row scales
constexpr int kStripRows = 8;
struct StripArgs {
  const PackedMatrix* w;
  int strip;
  const void* const* rows;  // as StripKernels::place made them
  int tokens;
  const uint8_t* next;       // the strip to prefetch meanwhile, of the same length; or null
  float* results;            // [tokens, 16]
  int activation_bits = 16;  // those that the rows were placed with
};
struct StripKernels {
  int exact_most, byte_most;       // the most rows for which they are faster than the GEMM, by bits of activations
  bool bytes;                      // whether X may be int8, with a scale for each token and 32 columns
  int64_t (*row_bytes)(int cols);  // of one prepared row, a multiple of 64
  void (*place)(const bf16* row, int cols, int activation_bits, void* out);
  void (*product)(const StripArgs&);

  int most(int activation_bits) const { return activation_bits == 8 ? byte_most : exact_most; }
};

// Applied to each output of a product: scale * c + bias.
struct Affine {
  const float *scale, *bias;  // [cols]; null stands for ones (scale) or zeros (bias)
};
static inline Affine affine_at(const Affine& out, int col) {
  return {out.scale ? out.scale + col : nullptr, out.bias ? out.bias + col : nullptr};
}
static inline void apply_affine(const Affine& out, int n, float* values) {
  for (int i = 0; i < n; i++) values[i] = (out.scale ? out.scale[i] : 1.f) * values[i] + (out.bias ? out.bias[i] : 0.f);
}
static inline Affine affine_at(const PackedMatrix& w, int row) { return affine_at(Affine{w.row_scale, w.bias}, row); }

// The activation between gate, up and down. Its arguments are clamped first:
//   h = g sigmoid(alpha g + cubic g^3) (u + shift),  g = min(gate, gate_limit), u = max(min(up, limit), -limit)
// SiLU(gate) * up has alpha 1, no limits and no shift. gpt-oss has alpha 1.702, limits 7 and shift 1. The cubic term
// makes tanh's GELU, since (1 + tanh(x)) / 2 = sigmoid(2 x). Without a gate, h = max(up, 0)^2.
struct Swiglu {
  float alpha = 1, limit = std::numeric_limits<float>::infinity(), shift = 0, cubic = 0, gate_limit = limit;
  bool gated = true;
};

// Turns gate and up, two results of one forward call, into h, the X of the down projection. Without a gate, all that
// is gate's is null or ignored, as it is in backward.
struct SwigluArgs {
  Swiglu function;
  int tokens, cols;
  const float *gate, *up;  // results
  Affine gate_out, up_out;
  bf16* h;                      // the first piece of the first strip, in pack_forward's layout
  bf16 *saved_gate, *saved_up;  // for swiglu_backward: values before clamping, in pack_rows' layout; or both null
  int64_t strip;                // elements from one strip to the next, in all three
};

// From dh, a backward result before the routing weight w, computes dgate and dup = w dh (dh / d gate, up), times the
// row scales of gate and up, and h. Rows after the last token become zeros. <dh, h> is written in parts of kDotCols
// columns, so that its sum does not depend on how the columns are divided into calls.
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
  float* weight_grads;          // [ceil(cols / kDotCols), tokens]
  int64_t weight_grads_stride;  // between its rows, in elements
};

// W8A8, for ISAs whose tiles multiply int8. Activations are scale * q with one scale a row and q in [-127, 127]. Strips
// of 16 rows form the B operand: 1 KB tiles of 64 columns, where row i of a tile holds columns 4i to 4i + 3 of every
// token. Columns are padded with zeros to whole tiles. Each strip ends with two unused tiles, as bf16 strips do.
struct Int8Rows {
  int8_t* codes;
  float* scales;
};
constexpr int kInt8TileCols = info(Format::kInt8).tile_cols;
constexpr int kMaxInt8Reduction = INT32_MAX / (127 * 127);  // keeps sums exact in int32
static constexpr int64_t int8_strip_bytes(int cols) {
  return int64_t(ceil_div(cols, kInt8TileCols) + 2) * kInt8TileCols * kTileRows;
}
static inline Int8Rows int8_rows_at(const Int8Rows& rows, int row, int cols) {
  return {rows.codes + row / kTileRows * int8_strip_bytes(cols), rows.scales + row};
}

// C[t, j] = scale[t] sum_i q[t, i] Q[out_begin + j, i]  + add[t, j], in the layout of a forward GEMM's results.
struct Int8GemmArgs {
  GemmArgs gemm;  // x and LoRA of the terms are ignored
  Int8Rows x;
  const float* add[2];  // added to each term, in the layout of its c; or null
};

struct Int8Kernels {
  void (*quantize)(const bf16* strip, int cols, int8_t* codes, float* scales);  // a strip in pack_forward's layout
  void (*gemm)(const Int8GemmArgs&);
};

// AdamW's scalars at step t, computed in double:
//   m = m + first_weight (g - m),  v = beta2 v + second_weight g^2
//   p = decay p - size m / (root_scale sqrt(v) + eps)
// first_weight = 1 - beta1, second_weight = 1 - beta2, root_scale = 1 / sqrt(1 - beta2^t), size = lr / (1 - beta1^t),
// decay = 1 - lr weight_decay. p, m and v are updated in place. Arithmetic is fp32; bf16 results are rounded once.
struct AdamStep {
  float decay, first_weight, beta2, second_weight, root_scale, eps, size;
};
template <class T>
using AdamKernel = void (*)(int64_t n, const AdamStep& step, const T* grad, T* param, T* exp_avg, T* exp_avg_sq);

// RMS norm of one row. With a residual, x is added to it first, and the norm is taken of their sum.
struct NormArgs {
  int size;
  const bf16* x;
  bf16* residual;  // or null
  const bf16* weight;
  float epsilon;
  bf16* out;  // may be x
};

// The gradient of one row's x, from that of its norm, without a residual.
struct NormBackwardArgs {
  int size;
  const bf16* x;
  const bf16* weight;
  float epsilon;
  const bf16* grad;  // of the norm
  bf16* out;         // may be grad
};

// Everything that is not a GEMM. n and cols are multiples of 16, except for adam's n.
struct VectorKernels {
  bool turned;  // whether the forward GEMM takes and gives transposed pieces
  // Packs sixteen rows (null stands for zeros) into one strip of pieces; pack_forward in the forward GEMM's layout.
  void (*pack_rows)(const bf16* const* rows, int cols, bf16* out);
  void (*pack_forward)(const bf16* const* rows, int cols, bf16* out);
  void (*unturn)(int pieces, float* c);  // makes forward results row-major 16 x 32 pieces, in place
  void (*swiglu)(const SwigluArgs&);
  void (*swiglu_backward)(const SwigluBackwardArgs&);
  // h of one row's 16 outputs
  void (*swiglu_strip)(const Swiglu& function, const float* gate, const float* up, const Affine& gate_out,
                       const Affine& up_out, bf16* h);
  // y[t, j] = c[t, j] * scale[j] + bias[j]; y is row-major
  void (*store_rows)(Pass pass, int tokens, int cols, const float* c, const Affine& out, bf16* y, int64_t ldy);
  bool (*finite)(int n, const bf16* x);
  void (*widen)(int n, const bf16* x, float* y);
  void (*narrow)(int n, const float* x, bf16* y);
  void (*scale_row)(int n, const bf16* x, const float* scale, bf16* y);       // y = x * scale
  void (*split)(int n, const float* x, float factor, bf16* high, bf16* low);  // high + low = x * factor
  float (*dot)(int n, const bf16* x, const float* y);
  void (*weighted_sum)(int n, int rows, const bf16* const* x, const float* weights, float* y);
  // Bit i says whether element first + i of the stream `key` is kept. The chance of that is 1 - probability.
  uint32_t (*dropout_mask)(uint64_t key, uint32_t first, float probability);
  AdamKernel<float> adam_f32;
  AdamKernel<bf16> adam_bf16;
  void (*norm)(const NormArgs&);
  void (*norm_backward)(const NormBackwardArgs&);
};

// Attention of one token's query heads that share keys and values, over the tokens [begin, end) of its context. A block
// of the KV cache has, for each head, the keys of its tokens by column, [head_size, block_size], then their values by
// token, [block_size, head_size].
struct AttentionArgs {
  int heads, head_size, block_size;  // sizes are multiples of 16
  const bf16* query;                 // [heads, head_size]
  float scale;
  const bf16* cache;  // the keys of block 0
  bool pairs;         // see KvCache
  int64_t block_stride;
  const int32_t* blocks;   // those of the context
  int begin, end;          // may be equal
  char* scratch;           // attention_scratch bytes, 64-byte aligned
  float* values;           // [heads, head_size]: the sums of values, weighted with exp(score - largest)
  float *largest, *total;  // [heads]: the largest score, -Inf without tokens, and the sum of the weights
};
size_t attention_scratch(int heads, int head_size);
using Attention = void (*)(const AttentionArgs&);

// Heads of one token, in place: norm(x) * norm weight, then rotary embedding for halves of the first `rotary` columns.
// Each is rounded to bf16.
struct HeadsArgs {
  int heads, head_size;  // a multiple of 16, up to kMostHeadSize
  bf16* x;               // [heads, head_size]
  const bf16* norm;      // [head_size]; or null
  float epsilon;
  const bf16* turn;  // [rotary]: cosines, then sines
  int rotary;        // a multiple of 16, up to head_size
};
constexpr int kMostHeadSize = 1024;
using PrepareHeads = void (*)(const HeadsArgs&);

// Loops that measure the benchmark's ceilings. A call takes microseconds (up to 0.1 s with emulated tiles), works on
// kRateMemory bytes that fill() wrote, 64-byte aligned, and returns its FLOPs.
struct RateKernels {
  void (*fill)(char* memory);
  int64_t (*registers)(const char* memory);  // products on registers only
  int64_t (*hot)(char* memory);              // the forward GEMM's inner loop, operands in L1 and L2
};
constexpr size_t kRateMemory = size_t(256) << 10;

Gemm find_gemm(Isa isa, Format format, Pass pass);
const StripKernels& strip_kernels(Isa isa, Format format);
const VectorKernels& vector_kernels(Isa isa);
const RateKernels& rate_kernels(Isa isa);
Attention find_attention(Isa isa);
PrepareHeads find_prepare_heads(Isa isa);
const Int8Kernels* int8_kernels(Isa isa);  // null where there are none

}  // namespace ktft
