#include "moe/backward.h"

#include <algorithm>

#include "moe/backward_steps.h"
#include "moe/by_expert.h"
#include "moe/forward.h"
#include "moe/forward_steps.h"

namespace ktft {
namespace {

// Where everything that backward reads and writes is, except for dx.
Gradients place(const Call& call, Saved& saved, const Activations& act) {
  Workspace& ws = call.workspace();
  const Buffers<size_t>& sizes = call.sizes;
  Gradients at;
  at.dy = ws.dy.get<bf16>(sizes.dy);
  if (call.weights.biases()) at.bias_dots = ws.bias_dots.get<float>(sizes.bias_dots);
  for (int p = 0; p < 2; p++)
    at.low_rank[p] = saved.retained ? reinterpret_cast<float*>(saved.low_rank[p].data()) : act.low_rank[p].rows;
  constexpr int kDown = int(Projection::kDown);
  at.low_rank_dy = {ws.low_rank[kDown].get<float>(sizes.low_rank[kDown]),
                    ws.low_rank_operand[kDown].get<bf16>(sizes.low_rank_operand[kDown])};
  for (int n = 0; n < call.weights.nodes(); n++) {
    NodeBuffers<Growing>& node = ws.nodes[n];
    const NodeBuffers<size_t>& node_sizes = sizes.nodes[n];
    const int id = call.runtime.node_ids[n];
    Gradients::PerNode out;
    out.gate = saved.retained ? reinterpret_cast<bf16*>(saved.nodes[n].gate.data()) : act.nodes[n].gate;
    out.up = saved.retained ? reinterpret_cast<bf16*>(saved.nodes[n].up.data()) : act.nodes[n].up;
    out.low_rank_down =
        saved.retained ? reinterpret_cast<float*>(saved.nodes[n].low_rank_down.data()) : act.nodes[n].down.rows;
    if (call.pair(Projection::kDown)) out.h = act.nodes[n].h;
    for (int p = 0; p < 2; p++) {
      out.grad[p] = node.grad[p].get<bf16>(node_sizes.grad[p], id);
      out.low_rank[p] = {node.low_rank[p].get<float>(node_sizes.low_rank[p], id),
                         node.low_rank_operand[p].get<bf16>(node_sizes.low_rank_operand[p], id)};
    }
    out.weight_grads = node.weight_grads.get<float>(node_sizes.weight_grads, id);
    at.nodes.push_back(out);
  }
  return at;
}

// grad_weights[token, slot] = <dh, h> + <dy, down's bias>, summed in a fixed order.
void reduce_weight_grads(const Call& call, const Gradients& at, float* out) {
  std::fill_n(out, call.routes.route_row.size(), 0.f);  // routes to experts elsewhere have no row
  for (int row = 0; row < call.routes.rows; row++) {
    float sum = at.bias_dots ? at.bias_dots[row] : 0;
    for (int n = 0; n < call.weights.nodes(); n++)
      for (int part = 0; part < ceil_div(call.weights.width(n), kDotCols); part++)
        sum += at.nodes[n].weight_grads[size_t(part) * call.routes.rows + row];
    out[call.routes.row_route[row]] = sum;
  }
}

// Runs every step as one phase of all experts.
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

void backward(Call& call, Saved& saved, const BackwardArgs& args) {
  const TokenRows hidden{args.hidden, args.dtype}, dy{args.grad_output, args.dtype};
  plan(call, CallWork::backward(saved.retained));
  const PackedLora lora = pack_lora(call);
  const Activations act = place_activations(call, nullptr);
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
