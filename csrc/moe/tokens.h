// Gathers tokens, as torch has them, into each expert's rows, as the kernels take them, and sums each token's results.
#pragma once

#include "moe/call.h"

namespace ktft {

// Hidden states or their gradients, in torch's memory.
struct TokenRows {
  const void* data;  // [tokens, hidden]
  Dtype dtype;
};

// Columns [col, col + cols) of one token as bf16: in place, or converted into `out`. spare [cols] is needed for fp16.
const bf16* bf16_row(const Call& call, const TokenRows& tokens, int token, int col, int cols, bf16* out, float* spare);

// How rows are gathered.
struct Gather {
  Pass pass;                   // whose GEMM reads them; forward has a layout of its own
  bool check = false;          // look for NaN and Inf
  bool scaled = false;         // multiply by down's row scales, if the format has them
  float* bias_dots = nullptr;  // [rows of the call]: receives <token, down's bias>; or null
  int col = 0, cols = 0;       // only these columns, and none of the above; `out` is in cache. All columns if cols is 0
};
// Gathers one expert's rows as bf16 into `out`, their first strip. Returns a token with NaN or Inf, or -1.
int gather_chunk(const Call& call, const TokenRows& tokens, const Gather& how, const RowChunk& chunk, bf16* out,
                 Scratch& scratch);
// Throws if `token` is not -1.
void check_finite(const Call& call, int token);

// out [tokens, hidden] = the sum of each token's rows in all nodes' y [rows, hidden], by routing weights if `weighted`.
void combine(const Call& call, const std::vector<bf16*>& y, bool weighted, void* out, Dtype dtype);

}  // namespace ktft
