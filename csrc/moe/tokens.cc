#include "moe/tokens.h"

#include <algorithm>

namespace ktft {
namespace {

constexpr int kTokensPerTask = 16, kColsPerTask = 1024;  // of combine; columns are divided if tokens give too few tasks

}  // namespace

const bf16* bf16_row(const Call& call, const TokenRows& tokens, int token, int col, int cols, bf16* out, float* spare) {
  const size_t at = size_t(token) * call.weights.shape().hidden + col;
  if (tokens.dtype == Dtype::kBf16) return static_cast<const bf16*>(tokens.data) + at;
  const float* wide = static_cast<const float*>(tokens.data) + at;
  if (tokens.dtype == Dtype::kF16) {
    for (int c = 0; c < cols; c++) spare[c] = half_to_float(static_cast<const uint16_t*>(tokens.data)[at + c]);
    wide = spare;
  }
  call.vec().narrow(cols, wide, out);
  return out;
}

int gather_chunk(const Call& call, const TokenRows& tokens, const Gather& how, const RowChunk& chunk, bf16* out,
                 Scratch& scratch) {
  const VectorKernels& vec = call.vec();
  const int hidden = call.weights.shape().hidden, cols = how.cols ? how.cols : hidden;
  bf16* const rows = scratch.take<bf16>(size_t(kTileRows) * cols);
  float* const spare = scratch.take<float>(size_t(cols));
  const PackedMatrix down = call.weights.matrix(0, chunk.expert, Projection::kDown);
  const float* const scale = how.scaled ? down.row_scale : nullptr;
  bf16* const scaled = scale ? scratch.take<bf16>(size_t(kTileRows) * cols) : nullptr;
  const int end = how.pass == Pass::kForward
                      ? chunk.rows
                      : pad_rows(chunk.rows);  // padding rows matter only in backward, which sums over rows
  int bad = -1;
  // Rows are scattered over memory, and a store to a line that is in no cache waits for it as a load does. Both are
  // therefore prefetched one strip ahead.
  const auto prefetch_strip = [&](int t) {
    const size_t bytes = dtype_bytes(tokens.dtype);
    for (int r = t; r < std::min(t + kTileRows, chunk.rows); r++) {
      const size_t at = size_t(call.routes.token(chunk.begin + r)) * hidden + how.col;
      prefetch(static_cast<const char*>(tokens.data) + at * bytes, cols * bytes);
    }
    if (!how.cols) prefetch(out + activation_elements(t, cols), size_t(kTileRows) * cols * sizeof(bf16));
  };
  prefetch_strip(0);
  for (int t = 0; t < end; t += kTileRows) {
    if (t + kTileRows < end) prefetch_strip(t + kTileRows);
    const bf16* at[kTileRows] = {};
    for (int r = 0; r < std::min(kTileRows, chunk.rows - t); r++) {
      const int token = call.routes.token(chunk.begin + t + r);
      at[r] = bf16_row(call, tokens, token, how.col, cols, rows + size_t(r) * cols, spare);
      if (how.check && call.routes.leads(chunk.begin + t + r) && !vec.finite(hidden, at[r])) bad = token;
      if (how.bias_dots) how.bias_dots[chunk.begin + t + r] = vec.dot(hidden, at[r], down.bias);
      if (!scale) continue;
      vec.scale_row(hidden, at[r], scale, scaled + size_t(r) * hidden);
      at[r] = scaled + size_t(r) * hidden;
    }
    (how.pass == Pass::kForward ? vec.pack_forward : vec.pack_rows)(at, cols, out + activation_elements(t, cols));
    if (how.pass == Pass::kForward && vec.turned && chunk.rows <= kFewRows)
      for (int r = 0; r < chunk.rows; r++) place_few_row(at[r], r, hidden, out);
  }
  return bad;
}

void check_finite(const Call& call, int token) {
  KTFT_CHECK(token < 0, call.name, ": hidden states hold NaN or Inf (token ", token, " of ", call.routes.tokens,
             "). The layers before this one produced it: look for a too high learning rate, fp16 overflow (use bf16: "
             "true) or damaged weights");
}

void combine(const Call& call, const std::vector<bf16*>& y, bool weighted, void* out, Dtype dtype) {
  const Phase phase(call.runtime.phases, "combine");
  const Routes& routes = call.routes;
  const int hidden = call.weights.shape().hidden, nodes = int(y.size()), top_k = routes.top_k;
  const int blocks = ceil_div(routes.tokens, kTokensPerTask);
  const int parts = blocks < call.runtime.pool.threads() ? ceil_div(hidden, kColsPerTask) : 1;
  call.runtime.pool.run(blocks * parts, [&](int task, int thread) {
    const int first = task / parts * kTokensPerTask, col = task % parts * kColsPerTask;
    const int cols = parts == 1 ? hidden : std::min(kColsPerTask, hidden - col);
    Scratch& scratch = call.runtime.scratch[thread];
    scratch.reset();
    float* const spare = scratch.take<float>(size_t(cols));
    std::vector<const bf16*> rows(size_t(top_k) * nodes);
    std::vector<float> weights(rows.size());
    for (int t = first; t < std::min(routes.tokens, first + kTokensPerTask); t++) {
      int count = 0;
      for (int i = 0; i < top_k * nodes; i++) {
        const int route = t * top_k + i / nodes, row = routes.route_row[route];
        if (row == kElsewhere) continue;
        rows[count] = y[i % nodes] + size_t(row) * hidden + col;
        weights[count++] = weighted ? call.top_k_weights[route] : 1.f;
      }
      const size_t at = size_t(t) * hidden + col;
      float* const sum = dtype == Dtype::kF32 ? static_cast<float*>(out) + at : spare;
      call.vec().weighted_sum(cols, count, rows.data(), weights.data(), sum);
      if (dtype == Dtype::kBf16) call.vec().narrow(cols, sum, static_cast<bf16*>(out) + at);
      if (dtype == Dtype::kF16)
        for (int c = 0; c < cols; c++) static_cast<uint16_t*>(out)[at + c] = float_to_half(sum[c]);
    }
  });
}

}  // namespace ktft
