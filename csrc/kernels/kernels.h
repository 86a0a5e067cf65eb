// The kernel table: every kernel ktft can run, found by (ISA, format, pass). Dispatch, tests and benchmarks read it.
#pragma once

#include <vector>

#include "quant/format.h"

namespace ktft {

// A GEMM call computes at most so many outputs (rows of W forward, columns backward) for at most so many tokens: as
// large as its operands and results fit in L2, so that X is read from memory once for many outputs.
constexpr int kMaxOutputs = 256;
constexpr int kMaxTokens = 256;
// Rows of W forward (columns backward) are decoded this many reduction elements at a time; the block stays in L2.
constexpr int kReductionBlock = 1024;

// A caller's X ends with this many readable rows that do not count: tile kernels take tokens 32 at a time.
constexpr int kTokenPad = 32;

// forward:   Y[t, j] (+)= row_scale[j] sum_i X[t, i] Q[out_begin + j, i]
// backward:  Y[t, j] (+)= sum_i X[t, i] Q[i, out_begin + j]
// W = diag(row_scale) Q; backward's caller has multiplied X by row_scale, once for all blocks.
struct GemmArgs {
  const PackedMatrix* w;
  int out_begin, out_count;  // a multiple of 32 outputs, at most kMaxOutputs
  // [tokens, reduction] row-major with stride ldx; or, forward where VectorKernels::pack_tokens is set, what that made
  // of the rows: strips of 16 tokens, ldx does not count.
  const bf16* x;
  int64_t ldx;
  int tokens;
  float* y;         // [tokens rounded up to 32, out_count], row stride kMaxOutputs
  bool accumulate;  // add to y; backward only
  char* scratch;    // kGemmScratch bytes, 64-byte aligned
};
// A decoded panel, spare pieces, and sums before they are turned.
constexpr size_t kGemmScratch =
    size_t(kReductionBlock + kTileRows) * 64 * sizeof(bf16) + size_t(kMaxOutputs) * kMaxTokens * sizeof(float);
static_assert(kTokenPad == 32);

struct GemmKernel {
  Isa isa;
  Format format;
  Pass pass;
  const char* name;
  void (*run)(const GemmArgs&);
};

// C[i, j] += alpha * sum_p A(i, p) B(p, j), fp32; see each member for the strides.
struct VectorKernels {
  // A row-major [m, k] and B row-major [n, k]: both read along k, a multiple of 16. C row stride ldc.
  void (*gemm_nt)(int m, int n, int k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                  float alpha);
  // A(i, p) = a[i * row_stride + p * col_stride]; B row-major [k, n], n a multiple of 16.
  void (*gemm_nn)(int m, int n, int k, const float* a, int64_t row_stride, int64_t col_stride, const float* b,
                  int64_t ldb, float* c, int64_t ldc, float alpha);
  void (*silu_mul)(int n, const float* g, const float* u, bf16* h);  // h = SiLU(g) * u
  // Given dh (before the routing weight w), g and u: dg, du = w * dh * d(SiLU(g) u), h = SiLU(g) u; returns <dh, h>.
  float (*silu_mul_backward)(int n, float w, const float* dh, const bf16* g, const bf16* u, float* dg, float* du,
                             float* h);
  void (*widen)(int n, const bf16* x, float* y);
  void (*narrow)(int n, const float* x, bf16* y);
  void (*narrow_scaled)(int n, const float* x, const float* scale, bf16* y);  // y = x * scale, element by element
  // Rows for a forward GEMM as its ISA wants them, [tokens rounded up to 16, cols] elements; null: as they are.
  void (*pack_tokens)(int tokens, int cols, const bf16* x, int64_t ldx, bf16* out);
  void (*add_scaled)(int n, float alpha, const float* x, float* y);  // y += alpha x
  // Zeroes element i where hash(key, first + i) < probability, and scales the others by 1 / (1 - probability).
  void (*dropout)(int n, float* x, uint64_t key, uint32_t first, float probability);
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

}  // namespace ktft
