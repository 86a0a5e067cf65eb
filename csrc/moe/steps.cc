#include "moe/steps.h"

#include <algorithm>
#include <span>

#include "moe/w8a8.h"

namespace ktft {
namespace {

constexpr Projection kDown = Projection::kDown;

// A product whose outputs, and LoRA's, begin at `col`.
GemmTerm term_at(int col, const PackedMatrix& w, const bf16* x, float* c) {
  return {.w = &w, .out_begin = col, .x = x, .lora_begin = col, .c = c};
}

// The strip of output `at`, or null behind the last one and where another thread may read it.
const uint8_t* next_strip(const Call& call, const PackedMatrix& w, int at) {
  return call.by_expert && at < w.rows ? w.tile(at / kTileRows, 0) : nullptr;
}

float* results(Scratch& scratch, const RowChunk& rows, int cols) {
  return scratch.take<float>(size_t(pad_rows(rows.rows)) * cols);
}

void product(const Call& call, GemmArgs args, const Int8Rows& x, const RowChunk& rows, Scratch& scratch) {
  count_weights(call, Pass::kForward, args);
  args.activation_bits = call.activation_bits;
  if (!call.int8) return run_gemm(call, call.weights.format(), Pass::kForward, args);
  int8_product(call, args, int8_rows_at(x, rows.packed, args.terms[0].w->cols), scratch);
}

// The rows with dropout applied: the rows themselves without dropout, otherwise a copy.
const bf16* dropped(const Call& call, Projection p, const RowChunk& chunk, const bf16* rows, int cols, int first,
                    Scratch& scratch) {
  if (!call.lora || !call.lora->drops()) return rows;
  const size_t count = activation_elements(pad_rows(chunk.rows), cols);
  bf16* const kept = scratch.take<bf16>(count);
  std::memcpy(kept, rows, count * sizeof(bf16));
  drop_rows(call, p, chunk, kept, cols, first, call.vec().turned);
  return kept;
}

// Calls fn(pair, packed, operand, adapter) for each LoRA that these rows of one expert have on a projection: that of
// the call, or those of adapters. `operand` is where the rows' low-rank activations lie.
template <class Fn>
void each_lora(const Call& call, const PackedLora& own, Projection p, const LowRank& low_rank, const RowChunk& rows,
               const Fn& fn) {
  if (const LoraPair* pair = call.pair(p)) fn(*pair, own, low_rank.operand_at(rows, pair->rank()), kNoAdapter);
  if (!call.adapters) return;
  const Adapters& adapters = *call.adapters;
  const int within = rows.begin - call.routes.experts[rows.slot].begin;
  for (int i = adapters.first[rows.slot]; i < adapters.first[rows.slot + 1]; i++) {
    const Lora& lora = *adapters.loras[adapters.of_slot[i]];
    const LoraPair* const pair = lora.pair(p);
    if (!pair) continue;
    const size_t first = activation_elements(adapters.packed[i] - low_rank.first, split_rank(call.dims.ranks[int(p)]));
    bf16* const at = low_rank.operand + first + activation_elements(within, split_rank(pair->rank()));
    fn(*pair, lora.kept->packed, at, adapters.of_slot[i]);
  }
}

// Computes the rows' low-rank activations of a projection from its input x, the chunk's first strip.
void low_rank_activations(const Call& call, const PackedLora& own, Projection p, const LowRank& low_rank, int node,
                          const RowChunk& chunk, const bf16* x, int cols, Scratch& scratch) {
  const int first = p == kDown ? call.weights.begin(node) : 0;
  RowChunk here = chunk;
  here.packed = 0;  // the operand of an adapter is where each_lora says
  each_lora(call, own, p, low_rank, chunk, [&](const LoraPair& pair, const PackedLora& packed, bf16* at, int adapter) {
    scratch.reset();
    low_rank_product(call, Pass::kForward, packed.a(call, p, chunk.slot, node), pair.rank(),
                     dropped(call, p, chunk, x, cols, first, scratch), here, {.rows = low_rank.rows, .operand = at},
                     scratch, adapter);
  });
}

// Makes LoRA on the rows a part of the product: all of it if they have one LoRA, otherwise that of their first adapter.
void set_lora(const Call& call, const PackedLora& own, Projection p, const LowRank& low_rank, int node,
              const RowChunk& rows, PackedMatrix& b, GemmTerm& term) {
  each_lora(call, own, p, low_rank, rows, [&](const LoraPair&, const PackedLora& packed, bf16* at, int) {
    if (term.lora) return;
    b = packed.b(call, p, rows.slot, node);
    term.lora = &b;
    term.low_rank = at;
  });
}

// Adds LoRA of the rows' other adapters to the product's results. Rows that have another adapter get zeros.
void add_other_loras(const Call& call, const PackedLora& own, Projection p, const LowRank& low_rank, int node,
                     const RowChunk& rows, const GemmTerm& term, const GemmArgs& args, float* spare) {
  if (!call.adapters) return;
  each_lora(call, own, p, low_rank, rows, [&](const LoraPair&, const PackedLora& packed, bf16* at, int) {
    if (at == term.low_rank) return;
    const PackedMatrix b = packed.b(call, p, rows.slot, node);
    run_gemm(call, Format::kBf16, Pass::kForward,
             {.terms = {{.w = &b, .out_begin = term.lora_begin, .x = at, .c = spare}},
              .out_count = args.out_count,
              .tokens = rows.rows,
              .scratch = args.scratch});
    const size_t count = size_t(pad_rows(rows.rows)) * args.out_count;
    for (size_t i = 0; i < count; i++) term.c[i] += spare[i];
  });
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

void ForwardSteps::gather_x(const TokenRows& tokens, const RowChunk& chunk, std::atomic<int>& bad,
                            Scratch& scratch) const {
  const int hidden = call.weights.shape().hidden;
  bf16* const rows = x ? x + activation_elements(chunk.packed, hidden)
                       : scratch.take<bf16>(activation_elements(pad_rows(chunk.rows), hidden));
  const int token = gather_chunk(call, tokens, {.pass = Pass::kForward, .check = true}, chunk, rows, scratch);
  if (token >= 0) bad = token;
  if (call.int8) quantize(call, rows, hidden, chunk, act.int8_x);
  for (const Projection p : call.weights.shape().inputs())
    low_rank_activations(call, lora, p, act.low_rank[int(p)], 0, chunk, rows, hidden, scratch);
}

void ForwardSteps::gate_up_block(int node, const RowChunk& rows, int block, Scratch& scratch) const {
  const PackedExperts& w = call.weights;
  const std::span<const Projection> inputs = w.shape().inputs();
  const int width = w.width(node), count = int(inputs.size()), most = call.block / count, col = block * most,
            cols = std::min(most, width - col);
  GemmArgs args{
      .terms = {}, .count = count, .out_count = cols, .tokens = rows.rows, .scratch = scratch.take<char>(kGemmScratch)};
  PackedMatrix matrix[2], b[2];
  for (int i = 0; i < count; i++) {
    const Projection p = inputs[i];
    matrix[i] = w.matrix(node, rows.expert, p);
    args.terms[i] = term_at(col, matrix[i], x ? x + activation_elements(rows.packed, w.shape().hidden) : nullptr,
                            results(scratch, rows, cols));
    set_lora(call, lora, p, act.low_rank[int(p)], node, rows, b[i], args.terms[i]);
  }
  float* const spare = call.dims.counts.adapters > 1 ? results(scratch, rows, cols) : nullptr;
  args.next = next_strip(call, matrix[0], col + cols);
  if (!args.next) args.next = next_strip(call, w.matrix(node, rows.expert, kDown), 0);
  product(call, args, act.int8_x, rows, scratch);
  for (int i = 0; i < count; i++)
    add_other_loras(call, lora, inputs[i], act.low_rank[int(inputs[i])], node, rows, args.terms[i], args, spare);
  const Activations::PerNode& out = act.nodes[node];
  const size_t at = activation_elements(rows.packed, width) + size_t(col) * kTileRows;
  call.vec().swiglu({.function = call.swiglu,
                     .tokens = rows.rows,
                     .cols = cols,
                     .gate = args.terms[0].c,
                     .up = args.terms[count - 1].c,
                     .gate_out = affine_at(matrix[0], col),
                     .up_out = affine_at(matrix[count - 1], col),
                     .h = out.h + at,
                     .saved_gate = out.gate ? out.gate + at : nullptr,
                     .saved_up = out.up ? out.up + at : nullptr,
                     .strip = strip_elements(width)});
}

void ForwardSteps::hidden_low_rank(int node, const RowChunk& chunk, Scratch& scratch) const {
  const int width = call.weights.width(node);
  const bf16* const h = act.nodes[node].h + activation_elements(chunk.packed, width);
  low_rank_activations(call, lora, kDown, act.nodes[node].down, node, chunk, h, width, scratch);
}

void ForwardSteps::down_block(int node, const RowChunk& rows, int block, bf16* y, Scratch& scratch) const {
  const PackedExperts& w = call.weights;
  const int hidden = w.shape().hidden, col = block * call.block, cols = std::min(call.block, hidden - col);
  const PackedMatrix matrix = w.matrix(node, rows.expert, kDown);
  PackedMatrix b;
  float* const c = results(scratch, rows, cols);
  GemmTerm term = term_at(col, matrix, act.nodes[node].h + activation_elements(rows.packed, w.width(node)), c);
  const LowRank& low_rank = act.nodes[node].down;
  set_lora(call, lora, kDown, low_rank, node, rows, b, term);
  float* const spare = call.dims.counts.adapters > 1 ? results(scratch, rows, cols) : nullptr;
  const GemmArgs args{.terms = {term},
                      .out_count = cols,
                      .tokens = rows.rows,
                      .scratch = scratch.take<char>(kGemmScratch),
                      .next = next_strip(call, matrix, col + cols)};
  product(call, args, act.nodes[node].int8_h, rows, scratch);
  add_other_loras(call, lora, kDown, low_rank, node, rows, term, args, spare);
  call.vec().store_rows(Pass::kForward, rows.rows, cols, c, affine_at(matrix, col),
                        y + size_t(rows.begin) * hidden + col, hidden);
}

void BackwardSteps::gather_dy(const TokenRows& dy, const RowChunk& chunk, Scratch& scratch) const {
  bf16* const rows = at.dy + activation_elements(chunk.packed, call.weights.shape().hidden);
  gather_chunk(call, dy, {.pass = Pass::kBackward, .scaled = true, .bias_dots = at.bias_dots}, chunk, rows, scratch);
  const LoraPair* const pair = call.pair(kDown);
  if (!pair) return;
  scratch.reset();
  low_rank_product(call, Pass::kBackward, lora.b(call, kDown, chunk.slot, 0), pair->rank(), rows, chunk, at.low_rank_dy,
                   scratch);
}

void BackwardSteps::intermediate_block(int node, const RowChunk& rows, int block, Scratch& scratch) const {
  const PackedExperts& w = call.weights;
  const int width = w.width(node), col = block * call.block, cols = std::min(call.block, width - col);
  const PackedMatrix matrix = w.matrix(node, rows.expert, kDown);
  float* const dh = results(scratch, rows, cols);
  float* const weights = scratch.take<float>(size_t(rows.rows));
  char* const gemm = scratch.take<char>(kGemmScratch);
  GemmTerm term = term_at(col, matrix, at.dy + activation_elements(rows.packed, w.shape().hidden), dh);
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
  const auto scale = [&](Projection p) { return affine_at(w.matrix(node, rows.expert, p), col).scale; };
  const auto from = [to](bf16* place) { return place ? place + to : nullptr; };
  const Activations::PerNode& in = at.act.nodes[node];
  const Gradients::PerNode& out = at.nodes[node];
  call.vec().swiglu_backward({.function = call.swiglu,
                              .tokens = rows.rows,
                              .cols = cols,
                              .dh = dh,
                              .gate = from(in.gate),
                              .up = in.up + to,
                              .gate_scale = scale(Projection::kGate),
                              .up_scale = scale(Projection::kUp),
                              .weights = weights,
                              .dgate = from(out.grad[0]),
                              .dup = out.grad[1] + to,
                              .h = pair ? in.h + to : nullptr,
                              .strip = strip_elements(width),
                              .weight_grads = out.weight_grads + size_t(col / kDotCols) * call.routes.rows + rows.begin,
                              .weight_grads_stride = call.routes.rows});
}

void BackwardSteps::hidden_block(int node, const RowChunk& rows, int block, Scratch& scratch) const {
  const PackedExperts& w = call.weights;
  const int hidden = w.shape().hidden, col = block * call.block, cols = std::min(call.block, hidden - col);
  const Gradients::PerNode& in = at.nodes[node];
  float* const c = results(scratch, rows, cols);
  char* const gemm = scratch.take<char>(kGemmScratch);
  const std::span<const Projection> inputs = w.shape().inputs();
  const int count = int(inputs.size());
  GemmArgs args{.terms = {}, .count = count, .out_count = cols, .tokens = rows.rows, .scratch = gemm};
  PackedMatrix matrix[2], a[2];
  const bool drops = call.lora && call.lora->drops();
  for (int i = 0; i < count; i++) {
    const Projection p = inputs[i];
    matrix[i] = w.matrix(node, rows.expert, p);
    args.terms[i] = term_at(col, matrix[i], in.grad[int(p)] + activation_elements(rows.packed, w.width(node)), c);
    if (const LoraPair* pair = call.pair(p)) {
      a[i] = lora.a(call, p, rows.slot, node);
      args.terms[i].lora = drops ? nullptr : &a[i];
      args.terms[i].low_rank = in.low_rank[int(p)].operand_at(rows, pair->rank());
    }
  }
  count_weights(call, Pass::kBackward, args);
  run_gemm(call, w.format(), Pass::kBackward, args);
  for (int i = 0; i < count; i++)
    if (drops && call.pair(inputs[i]))
      add_dropped_lora(call, inputs[i], a[i], args.terms[i].low_rank, rows, col, cols, col, c, gemm, scratch);
  call.vec().store_rows(Pass::kBackward, rows.rows, cols, c, {}, in.dx + size_t(rows.begin) * hidden + col, hidden);
}

void BackwardSteps::grad_low_rank(int node, const RowChunk& chunk, Scratch& scratch) const {
  const Gradients::PerNode& in = at.nodes[node];
  for (const Projection p : call.weights.shape().inputs())
    if (const LoraPair* pair = call.pair(p)) {
      scratch.reset();
      low_rank_product(call, Pass::kBackward, lora.b(call, p, chunk.slot, node), pair->rank(),
                       in.grad[int(p)] + activation_elements(chunk.packed, call.weights.width(node)), chunk,
                       in.low_rank[int(p)], scratch);
    }
}

int gate_up_blocks(const Call& call, int node) {
  return ceil_div(call.weights.width(node), call.block / int(call.weights.shape().inputs().size()));
}

int intermediate_blocks(const Call& call, int node) { return ceil_div(call.weights.width(node), call.block); }

int hidden_blocks(const Call& call, int) { return ceil_div(call.weights.shape().hidden, call.block); }

int one_block(const Call&, int) { return 1; }

}  // namespace ktft
