#include "moe/backward_steps.h"

#include <algorithm>

#include "moe/forward_steps.h"

namespace ktft {
namespace {

constexpr Projection kGateUp[2] = {Projection::kGate, Projection::kUp};
constexpr Projection kDown = Projection::kDown;

float* results(Scratch& scratch, const RowChunk& rows, int cols) {
  return scratch.take<float>(size_t(pad_rows(rows.rows)) * cols);
}

// Adds LoRA's part of one backward product to c. Dropout masks that part, so it cannot be a term of the base GEMM.
void add_dropped_lora(const Call& call, Projection p, const PackedMatrix& a, const bf16* low_rank, const RowChunk& rows,
                      int col, int cols, int first, float* c, char* gemm, Scratch& scratch) {
  float* const lora = results(scratch, rows, cols);
  run_gemm(call, Format::kBf16, Pass::kBackward,
           {.terms = {{.w = &a, .out_begin = col, .x = low_rank, .c = lora}},
            .out_count = cols,
            .tokens = rows.rows,
            .scratch = gemm});
  add_dropped(call, p, rows, lora, cols, first, c);
}

}  // namespace

void gather_dy(const Call& call, const PackedLora& lora, const TokenRows& dy, const Gradients& at,
               const RowChunk& chunk, Scratch& scratch) {
  bf16* const rows = at.dy + activation_elements(chunk.packed, call.weights.shape().hidden);
  gather_chunk(call, dy, {.pass = Pass::kBackward, .scaled = true, .bias_dots = at.bias_dots}, chunk, rows, scratch);
  const LoraPair* const pair = call.pair(kDown);
  if (!pair) return;
  scratch.reset();
  low_rank_product(call, Pass::kBackward, lora.b(call, kDown, chunk.slot, 0), pair->rank(), rows, chunk, at.low_rank_dy,
                   scratch);
}

void intermediate_block(const Call& call, const PackedLora& lora, const Gradients& at, int node, const RowChunk& rows,
                        int block, Scratch& scratch) {
  const PackedExperts& w = call.weights;
  const int width = w.width(node), col = block * call.block, cols = std::min(call.block, width - col);
  const PackedMatrix matrix = w.matrix(node, rows.expert, kDown);
  float* const dh = results(scratch, rows, cols);
  float* const weights = scratch.take<float>(size_t(rows.rows));
  char* const gemm = scratch.take<char>(kGemmScratch);
  GemmTerm term{.w = &matrix,
                .out_begin = col,
                .x = at.dy + activation_elements(rows.packed, w.shape().hidden),
                .lora_begin = col,
                .c = dh};
  PackedMatrix a;
  const LoraPair* const pair = call.pair(kDown);
  const bool drops = pair && call.lora->drops();
  if (pair) {
    a = lora.a(call, kDown, rows.slot, node);
    term.lora = drops ? nullptr : &a;
    term.low_rank = at.low_rank_dy.operand_at(rows, pair->rank());
  }
  const GemmArgs args{.terms = {term}, .out_count = cols, .tokens = rows.rows, .scratch = gemm};
  count_weights(call, Pass::kBackward, args);
  run_gemm(call, w.format(), Pass::kBackward, args);
  if (drops) add_dropped_lora(call, kDown, a, term.low_rank, rows, col, cols, w.begin(node) + col, dh, gemm, scratch);
  for (int t = 0; t < rows.rows; t++) weights[t] = call.row_weight(rows.begin + t);
  const size_t to = activation_elements(rows.packed, width) + size_t(col) * kTileRows;
  const auto scale = [&](Projection p) {
    const float* const all = w.matrix(node, rows.expert, p).row_scale;
    return all ? all + col : nullptr;
  };
  const Gradients::PerNode& out = at.nodes[node];
  call.vec().swiglu_backward({.function = call.swiglu,
                              .tokens = rows.rows,
                              .cols = cols,
                              .dh = dh,
                              .gate = out.gate + to,
                              .up = out.up + to,
                              .gate_scale = scale(Projection::kGate),
                              .up_scale = scale(Projection::kUp),
                              .weights = weights,
                              .dgate = out.grad[0] + to,
                              .dup = out.grad[1] + to,
                              .h = out.h ? out.h + to : nullptr,
                              .strip = strip_elements(width),
                              .weight_grads = out.weight_grads + size_t(col / kDotCols) * call.routes.rows + rows.begin,
                              .weight_grads_stride = call.routes.rows});
}

void hidden_block(const Call& call, const PackedLora& lora, const Gradients& at, int node, const RowChunk& rows,
                  int block, Scratch& scratch) {
  const PackedExperts& w = call.weights;
  const int hidden = w.shape().hidden, col = block * call.block, cols = std::min(call.block, hidden - col);
  const Gradients::PerNode& in = at.nodes[node];
  float* const c = results(scratch, rows, cols);
  char* const gemm = scratch.take<char>(kGemmScratch);
  GemmArgs args{.terms = {}, .count = 2, .out_count = cols, .tokens = rows.rows, .scratch = gemm};
  PackedMatrix matrix[2], a[2];
  const bool drops = call.lora && call.lora->drops();
  for (int p = 0; p < 2; p++) {
    matrix[p] = w.matrix(node, rows.expert, kGateUp[p]);
    args.terms[p] = {.w = &matrix[p],
                     .out_begin = col,
                     .x = in.grad[p] + activation_elements(rows.packed, w.width(node)),
                     .lora_begin = col,
                     .c = c};
    if (const LoraPair* pair = call.pair(kGateUp[p])) {
      a[p] = lora.a(call, kGateUp[p], rows.slot, node);
      args.terms[p].lora = drops ? nullptr : &a[p];
      args.terms[p].low_rank = in.low_rank[p].operand_at(rows, pair->rank());
    }
  }
  count_weights(call, Pass::kBackward, args);
  run_gemm(call, w.format(), Pass::kBackward, args);
  for (int p = 0; p < 2; p++)
    if (drops && call.pair(kGateUp[p]))
      add_dropped_lora(call, kGateUp[p], a[p], args.terms[p].low_rank, rows, col, cols, col, c, gemm, scratch);
  call.vec().store_rows(Pass::kBackward, rows.rows, cols, c, {}, in.dx + size_t(rows.begin) * hidden + col, hidden);
}

void grad_low_rank(const Call& call, const PackedLora& lora, const Gradients& at, int node, const RowChunk& chunk,
                   Scratch& scratch) {
  const Gradients::PerNode& in = at.nodes[node];
  for (int p = 0; p < 2; p++)
    if (const LoraPair* pair = call.pair(kGateUp[p])) {
      scratch.reset();
      low_rank_product(call, Pass::kBackward, lora.b(call, kGateUp[p], chunk.slot, node), pair->rank(),
                       in.grad[p] + activation_elements(chunk.packed, call.weights.width(node)), chunk, in.low_rank[p],
                       scratch);
    }
}

int intermediate_blocks(const Call& call, int node) { return ceil_div(call.weights.width(node), call.block); }

}  // namespace ktft
