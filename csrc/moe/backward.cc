#include <algorithm>
#include <functional>

#include "moe/passes.h"
#include "moe/steps.h"

namespace ktft {
namespace {

// Where everything that backward reads and writes is.
Gradients place(const Call& call, Saved& saved) {
  constexpr int kDown = int(Projection::kDown);
  Workspace& ws = call.workspace();
  const Buffers<size_t>& sizes = call.sizes;
  Gradients at;
  at.act = place_activations(call, saved.retained ? &saved : nullptr);
  at.dy = ws.dy.get<bf16>(sizes.dy);
  if (call.weights.biases()) at.bias_dots = ws.bias_dots.get<float>(sizes.bias_dots);
  at.low_rank_dy = {ws.low_rank[kDown].get<float>(sizes.low_rank[kDown]),
                    ws.low_rank_operand[kDown].get<bf16>(sizes.low_rank_operand[kDown])};
  const std::vector<bf16*> dx = place_rows(call);
  for (int n = 0; n < call.weights.nodes(); n++) {
    NodeBuffers<Growing>& node = ws.nodes[n];
    const NodeBuffers<size_t>& node_sizes = sizes.nodes[n];
    const int id = call.runtime.node_ids[n];
    Gradients::PerNode out;
    for (int p = 0; p < 2; p++) {
      out.grad[p] = node.grad[p].get<bf16>(node_sizes.grad[p], id);
      out.low_rank[p] = {node.low_rank[p].get<float>(node_sizes.low_rank[p], id),
                         node.low_rank_operand[p].get<bf16>(node_sizes.low_rank_operand[p], id)};
    }
    out.weight_grads = node.weight_grads.get<float>(node_sizes.weight_grads, id);
    out.dx = dx[n];
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
  const BackwardSteps steps{call, lora, at};
  each_chunk(call, "gather", [&](const RowChunk& chunk, Scratch& scratch) { steps.gather_dy(dy, chunk, scratch); });
  each_block(call, "d gate, d up", call.routes.calls, intermediate_blocks,
             std::bind_front(&BackwardSteps::intermediate_block, &steps));
  if (call.pair(Projection::kGate) || call.pair(Projection::kUp))
    each_block(
        call, "lora B dgate", call.routes.chunks, one_block,
        [&](int node, const RowChunk& chunk, int, Scratch& scratch) { steps.grad_low_rank(node, chunk, scratch); });
  each_block(call, "d hidden", call.routes.calls, hidden_blocks, std::bind_front(&BackwardSteps::hidden_block, &steps));
  if (call.lora) lora_gradients(call, at, hidden);
}

}  // namespace

void backward(Call& call, Saved& saved, const BackwardArgs& args) {
  const TokenRows hidden{args.hidden, args.dtype}, dy{args.grad_output, args.dtype};
  plan(call, backward_work(saved.retained));
  const PackedLora lora = pack_lora(call);
  const Gradients at = place(call, saved);
  if (!saved.retained && !call.by_expert) gate_up(call, lora, hidden, at.act);
  if (call.by_expert)
    backward_by_expert(call, !saved.retained, at, hidden, dy);
  else
    by_phases(call, lora, at, hidden, dy);
  reduce_weight_grads(call, at, args.grad_weights);
  combine(call, place_rows(call), false, args.grad_hidden, args.dtype);
}

}  // namespace ktft
