#include "moe/forward_steps.h"

#include "moe/w8a8.h"

namespace ktft {
namespace {

constexpr Projection kGateUp[2] = {Projection::kGate, Projection::kUp};
constexpr Projection kDown = Projection::kDown;

void product(const Call& call, const GemmArgs& args, const Int8Rows& x, const RowChunk& rows, Scratch& scratch) {
  count_weights(call, Pass::kForward, args);
  if (!call.int8) return run_gemm(call, call.weights.format(), Pass::kForward, args);
  int8_product(call, args, int8_rows_at(x, rows.packed, args.terms[0].w->cols), scratch);
}

// The rows with dropout applied: the rows themselves without dropout, otherwise a copy.
const bf16* dropped(const Call& call, Projection p, const RowChunk& chunk, const bf16* rows, int cols, int first,
                    Scratch& scratch) {
  if (!call.lora->drops()) return rows;
  const size_t count = activation_elements(pad_rows(chunk.rows), cols);
  bf16* const kept = scratch.take<bf16>(count);
  std::memcpy(kept, rows, count * sizeof(bf16));
  drop_rows(call, p, chunk, kept, cols, first, call.vec().turned);
  return kept;
}

}  // namespace

void input_low_rank(const Call& call, const PackedLora& lora, const bf16* x, const Activations& act,
                    const RowChunk& chunk, Scratch& scratch) {
  const int hidden = call.weights.shape().hidden;
  const bf16* const rows = x + activation_elements(chunk.packed, hidden);
  for (int p = 0; p < 2; p++)
    if (const LoraPair* pair = call.pair(kGateUp[p])) {
      scratch.reset();
      low_rank_product(call, Pass::kForward, lora.a(call, kGateUp[p], chunk.slot, 0), pair->rank(),
                       dropped(call, kGateUp[p], chunk, rows, hidden, 0, scratch), chunk, act.low_rank[p], scratch);
    }
}

void gate_up_block(const Call& call, const PackedLora& lora, const bf16* x, const Activations& act, int node,
                   const RowChunk& rows, int block, Scratch& scratch) {
  const PackedExperts& w = call.weights;
  const int width = w.width(node), col = block * call.block / 2, cols = std::min(call.block / 2, width - col);
  GemmArgs args{
      .terms = {}, .count = 2, .out_count = cols, .tokens = rows.rows, .scratch = scratch.take<char>(kGemmScratch)};
  PackedMatrix matrix[2], b[2];
  for (int p = 0; p < 2; p++) {
    matrix[p] = w.matrix(node, rows.expert, kGateUp[p]);
    args.terms[p] = {.w = &matrix[p],
                     .out_begin = col,
                     .x = x ? x + activation_elements(rows.packed, w.shape().hidden) : nullptr,
                     .lora_begin = col,
                     .c = scratch.take<float>(size_t(pad_rows(rows.rows)) * cols)};
    if (const LoraPair* pair = call.pair(kGateUp[p])) {
      b[p] = lora.b(call, kGateUp[p], rows.slot, node);
      args.terms[p].lora = &b[p];
      args.terms[p].low_rank = act.low_rank[p].operand_at(rows, pair->rank());
    }
  }
  product(call, args, act.int8_x, rows, scratch);
  const Activations::PerNode& out = act.nodes[node];
  const size_t at = activation_elements(rows.packed, width) + size_t(col) * kTileRows;
  call.vec().swiglu({.function = call.swiglu,
                     .tokens = rows.rows,
                     .cols = cols,
                     .gate = args.terms[0].c,
                     .up = args.terms[1].c,
                     .gate_out = affine_at(matrix[0], col),
                     .up_out = affine_at(matrix[1], col),
                     .h = out.h + at,
                     .saved_gate = out.gate ? out.gate + at : nullptr,
                     .saved_up = out.gate ? out.up + at : nullptr,
                     .strip = strip_elements(width)});
}

void hidden_low_rank(const Call& call, const PackedLora& lora, const Activations& act, int node, const RowChunk& chunk,
                     Scratch& scratch) {
  const int width = call.weights.width(node);
  const bf16* const h = act.nodes[node].h + activation_elements(chunk.packed, width);
  low_rank_product(call, Pass::kForward, lora.a(call, kDown, chunk.slot, node), call.pair(kDown)->rank(),
                   dropped(call, kDown, chunk, h, width, call.weights.begin(node), scratch), chunk,
                   act.nodes[node].down, scratch);
}

void down_block(const Call& call, const PackedLora& lora, const Activations& act, int node, const RowChunk& rows,
                int block, bf16* y, Scratch& scratch) {
  const PackedExperts& w = call.weights;
  const int hidden = w.shape().hidden, col = block * call.block, cols = std::min(call.block, hidden - col);
  const PackedMatrix matrix = w.matrix(node, rows.expert, kDown);
  PackedMatrix b;
  float* const c = scratch.take<float>(size_t(pad_rows(rows.rows)) * cols);
  GemmTerm term{.w = &matrix,
                .out_begin = col,
                .x = act.nodes[node].h + activation_elements(rows.packed, w.width(node)),
                .lora_begin = col,
                .c = c};
  if (const LoraPair* pair = call.pair(kDown)) {
    b = lora.b(call, kDown, rows.slot, node);
    term.lora = &b;
    term.low_rank = act.nodes[node].down.operand_at(rows, pair->rank());
  }
  const GemmArgs args{
      .terms = {term}, .out_count = cols, .tokens = rows.rows, .scratch = scratch.take<char>(kGemmScratch)};
  product(call, args, act.nodes[node].int8_h, rows, scratch);
  call.vec().store_rows(Pass::kForward, rows.rows, cols, c, affine_at(matrix, col),
                        y + size_t(rows.begin) * hidden + col, hidden);
}

int gate_up_blocks(const Call& call, int node) { return ceil_div(call.weights.width(node), call.block / 2); }

int hidden_blocks(const Call& call) { return ceil_div(call.weights.shape().hidden, call.block); }

}  // namespace ktft
