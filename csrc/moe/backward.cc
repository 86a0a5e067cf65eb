#include "moe/backward.h"

#include <algorithm>

#include "moe/by_expert.h"
#include "moe/lora_grad.h"

namespace ktft {
namespace {

constexpr Projection kGateUp[2] = {Projection::kGate, Projection::kUp};
constexpr Projection kDown = Projection::kDown;

float* results(Scratch& scratch, const RowChunk& rows, int cols) {
  return scratch.take<float>(size_t(pad_rows(rows.rows)) * cols);
}

// c += LoRA's part of one backward product, which dropout masks: it cannot be a term of the base GEMM.
void add_dropped_lora(const Call& call, Projection p, const PackedMatrix& a, const bf16* low_rank, const RowChunk& rows,
                      int col, int cols, int first, float* c, char* gemm, Scratch& scratch) {
  float* const lora = results(scratch, rows, cols);
  run_gemm(call, Format::kBf16, Pass::kBackward,
           {{{&a, col, low_rank, nullptr, 0, nullptr, lora}}, 1, cols, rows.rows, gemm});
  add_dropped(call, p, rows, lora, cols, first, c);
}

Gradients place(const Call& call, Saved& saved, const Activations& act) {
  const PackedExperts& w = call.weights;
  Workspace& ws = call.runtime.workspace;
  const size_t rows = size_t(call.routes.rows);
  const int packed = call.by_expert ? 0 : call.routes.packed_rows;
  Gradients at{};
  at.dy = ws.dy.get<bf16>(activation_elements(packed, w.shape().hidden));
  if (w.biases()) at.bias_dots = ws.bias_dots.get<float>(rows);
  for (int p = 0; p < 2; p++)
    at.low_rank[p] = saved.retained ? reinterpret_cast<float*>(saved.low_rank[p].data()) : act.low_rank[p].rows;
  if (const LoraPair* pair = call.pair(kDown))
    at.low_rank_dy = {ws.low_rank[int(kDown)].get<float>(rows * pair->rank()),
                      ws.low_rank_operand[int(kDown)].get<bf16>(activation_elements(packed, split_rank(pair->rank())))};
  for (int n = 0; n < w.nodes(); n++) {
    NodeWorkspace& node = ws.nodes[n];
    const int id = call.runtime.node_ids[n];
    const size_t count = activation_elements(packed, w.width(n));
    Gradients::PerNode out{};
    out.gate = saved.retained ? reinterpret_cast<bf16*>(saved.nodes[n].gate.data()) : act.nodes[n].gate;
    out.up = saved.retained ? reinterpret_cast<bf16*>(saved.nodes[n].up.data()) : act.nodes[n].up;
    out.low_rank_down =
        saved.retained ? reinterpret_cast<float*>(saved.nodes[n].low_rank_down.data()) : act.nodes[n].down.rows;
    if (call.pair(kDown)) out.h = act.nodes[n].h;
    for (int p = 0; p < 2; p++) {
      out.grad[p] = node.grad[p].get<bf16>(count, id);
      if (const LoraPair* pair = call.pair(kGateUp[p]))
        out.low_rank[p] = {
            node.low_rank[p].get<float>(rows * pair->rank(), id),
            node.low_rank_operand[p].get<bf16>(activation_elements(packed, split_rank(pair->rank())), id)};
    }
    out.weight_grads = node.weight_grads.get<float>(rows * ceil_div(w.width(n), kDotCols), id);
    at.nodes.push_back(out);
  }
  return at;
}

// grad_weights[token, slot] = <dh, h> + <dy, down's bias>, summed in a fixed order.
void reduce_weight_grads(const Call& call, const Gradients& at, float* out) {
  std::fill_n(out, call.routes.route_row.size(), 0.f);  // of what is elsewhere
  for (int row = 0; row < call.routes.rows; row++) {
    float sum = at.bias_dots ? at.bias_dots[row] : 0;
    for (int n = 0; n < call.weights.nodes(); n++)
      for (int part = 0; part < ceil_div(call.weights.width(n), kDotCols); part++)
        sum += at.nodes[n].weight_grads[size_t(part) * call.routes.rows + row];
    out[call.routes.row_route[row]] = sum;
  }
}

}  // namespace

void gather_dy(const Call& call, const PackedLora& lora, const TokenRows& dy, const Gradients& at,
               const RowChunk& chunk, Scratch& scratch) {
  bf16* const rows = at.dy + activation_elements(chunk.packed, call.weights.shape().hidden);
  gather_chunk(call, dy, {Pass::kBackward, false, true, at.bias_dots}, chunk, rows, scratch);
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
  GemmTerm term{&matrix, col, at.dy + activation_elements(rows.packed, w.shape().hidden), nullptr, col, nullptr, dh};
  PackedMatrix a;
  const LoraPair* const pair = call.pair(kDown);
  const bool drops = pair && call.lora->drops();
  if (pair) {
    a = lora.a(call, kDown, rows.slot, node);
    term.lora = drops ? nullptr : &a;
    term.low_rank = at.low_rank_dy.operand_at(rows, pair->rank());
  }
  const GemmArgs args{{term}, 1, cols, rows.rows, gemm};
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
  call.vec().swiglu_backward(
      {call.swiglu, rows.rows, cols, dh, out.gate + to, out.up + to, scale(Projection::kGate), scale(Projection::kUp),
       weights, out.grad[0] + to, out.grad[1] + to, out.h ? out.h + to : nullptr, strip_elements(width),
       out.weight_grads + size_t(col / kDotCols) * call.routes.rows + rows.begin, call.routes.rows});
}

void hidden_block(const Call& call, const PackedLora& lora, const Gradients& at, int node, const RowChunk& rows,
                  int block, Scratch& scratch) {
  const PackedExperts& w = call.weights;
  const int hidden = w.shape().hidden, col = block * call.block, cols = std::min(call.block, hidden - col);
  const Gradients::PerNode& in = at.nodes[node];
  float* const c = results(scratch, rows, cols);
  char* const gemm = scratch.take<char>(kGemmScratch);
  GemmArgs args{{}, 2, cols, rows.rows, gemm};
  PackedMatrix matrix[2], a[2];
  const bool drops = call.lora && call.lora->drops();
  for (int p = 0; p < 2; p++) {
    matrix[p] = w.matrix(node, rows.expert, kGateUp[p]);
    args.terms[p] = {&matrix[p], col, in.grad[p] + activation_elements(rows.packed, w.width(node)), nullptr, col,
                     nullptr,    c};
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

namespace {

// Every step as a phase of all experts.
void by_phases(const Call& call, const PackedLora& lora, const Gradients& at, const TokenRows& hidden,
               const TokenRows& dy) {
  const Routes& routes = call.routes;
  const int calls = int(routes.calls.size());
  each_chunk(call, "gather",
             [&](const RowChunk& chunk, Scratch& scratch) { gather_dy(call, lora, dy, at, chunk, scratch); });
  each_node(
      call, "d gate, d up", [&](int n) { return calls * intermediate_blocks(call, n); },
      [&](int node, int task, Scratch& scratch) {
        const int blocks = intermediate_blocks(call, node);
        intermediate_block(call, lora, at, node, routes.calls[task / blocks], task % blocks, scratch);
      });
  if (call.pair(Projection::kGate) || call.pair(Projection::kUp))
    each_node(
        call, "lora B dgate", [&](int) { return int(routes.chunks.size()); },
        [&](int node, int task, Scratch& scratch) {
          grad_low_rank(call, lora, at, node, routes.chunks[task], scratch);
        });
  const int blocks = hidden_blocks(call);
  each_node(
      call, "d hidden", [&](int) { return calls * blocks; },
      [&](int node, int task, Scratch& scratch) {
        hidden_block(call, lora, at, node, routes.calls[task / blocks], task % blocks, scratch);
      });
  if (call.lora) lora_gradients(call, at, hidden);
}

}  // namespace

void backward(const Call& call, Saved& saved, const BackwardArgs& args) {
  const TokenRows hidden{args.hidden, args.dtype}, dy{args.grad_output, args.dtype};
  reserve_scratch(call);
  const PackedLora lora = pack_lora(call);
  const Activations act = place_activations(call, nullptr, !saved.retained);
  if (!saved.retained && !call.by_expert) gate_up(call, lora, hidden, act);
  Gradients at = place(call, saved, act);
  const std::vector<bf16*> dx = place_rows(call);
  for (size_t n = 0; n < dx.size(); n++) at.nodes[n].dx = dx[n];
  if (call.by_expert)
    backward_by_expert(call, saved.retained ? nullptr : &act, at, hidden, dy);
  else
    by_phases(call, lora, at, hidden, dy);
  reduce_weight_grads(call, at, args.grad_weights);
  combine(call, dx, false, args.grad_hidden, args.dtype);
}

}  // namespace ktft
