#include "moe/activations.h"

namespace ktft {
namespace {

constexpr int kDown = int(Projection::kDown);

// Memory of the workspace, or, if `kept` is given, of what forward takes and backward finds.
template <class T>
T* place(const Call& call, NodeBuffer* kept, Growing& own, size_t bytes, int node_id) {
  if (!kept) return own.get<T>(bytes, node_id);
  if (bytes > kept->size()) *kept = call.runtime.buffers.take(bytes, node_id);
  return reinterpret_cast<T*>(kept->data());
}

}  // namespace

Saved::~Saved() {
  for (NodeBuffer& buffer : low_rank) runtime->buffers.give(std::move(buffer));
  for (PerNode& node : nodes)
    for (NodeBuffer* buffer : {&node.gate, &node.up, &node.low_rank_down}) runtime->buffers.give(std::move(*buffer));
}

size_t Saved::bytes() const {
  size_t total = low_rank[0].size() + low_rank[1].size();
  for (const PerNode& node : nodes) total += node.gate.size() + node.up.size() + node.low_rank_down.size();
  return total;
}

Activations place_activations(const Call& call, Saved* saved) {
  Workspace& ws = call.workspace();
  Activations act;
  if (saved) saved->nodes.resize(call.weights.nodes());
  if (call.int8) act.int8_x = {ws.x_codes.get<int8_t>(call.sizes.x_codes), ws.x_scales.get<float>(call.sizes.x_scales)};
  for (int p = 0; p < 2; p++) {
    if (!call.has_lora(kGateUp[p])) continue;
    if (call.lora)
      act.low_rank[p].rows = place<float>(call, saved ? &saved->low_rank[p] : nullptr, ws.low_rank[p],
                                          low_rank_size(call.dims, kGateUp[p]), -1);
    act.low_rank[p].operand = ws.low_rank_operand[p].get<bf16>(call.sizes.low_rank_operand[p]);
  }
  for (int n = 0; n < call.weights.nodes(); n++) {
    const int id = call.runtime.node_ids[n];
    const NodeBuffers<size_t>& sizes = call.sizes.nodes[n];
    NodeBuffers<Growing>& node = ws.nodes[n];
    Saved::PerNode* const keep = saved ? &saved->nodes[n] : nullptr;
    Activations::PerNode out;
    out.h = node.h.get<bf16>(sizes.h, id);
    if (keep || sizes.up) {
      if (call.weights.shape().gated)
        out.gate = place<bf16>(call, keep ? &keep->gate : nullptr, node.gate, gate_up_size(call.dims, n), id);
      out.up = place<bf16>(call, keep ? &keep->up : nullptr, node.up, gate_up_size(call.dims, n), id);
    }
    if (call.has_lora(Projection::kDown)) {
      if (call.lora)
        out.down.rows = place<float>(call, keep ? &keep->low_rank_down : nullptr, node.low_rank[kDown],
                                     low_rank_size(call.dims, Projection::kDown), id);
      out.down.operand = node.low_rank_operand[kDown].get<bf16>(sizes.low_rank_operand[kDown], id);
    }
    if (call.int8)
      out.int8_h = {node.h_codes.get<int8_t>(sizes.h_codes, id), node.h_scales.get<float>(sizes.h_scales, id)};
    act.nodes.push_back(out);
  }
  return act;
}

std::vector<bf16*> place_rows(const Call& call) {
  std::vector<bf16*> y;
  for (int n = 0; n < call.weights.nodes(); n++)
    y.push_back(call.workspace().nodes[n].y.get<bf16>(call.sizes.nodes[n].y, call.runtime.node_ids[n]));
  return y;
}

}  // namespace ktft
