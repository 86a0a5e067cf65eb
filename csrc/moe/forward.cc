#include "moe/forward.h"

#include <atomic>

#include "moe/by_expert.h"
#include "moe/forward_steps.h"
#include "moe/w8a8.h"

namespace ktft {

void gate_up(const Call& call, const PackedLora& lora, const TokenRows& tokens, const Activations& act) {
  const Routes& routes = call.routes;
  const int hidden = call.weights.shape().hidden;
  // With W8A8 and no LoRA, rows are quantized at once and need not be kept: they never leave L2
  const bool keeps = !call.int8 || call.dims.max_rank();
  bf16* const x = keeps ? call.workspace().x.get<bf16>(call.sizes.x) : nullptr;
  std::atomic<int> bad{-1};
  each_chunk(call, "gather", [&](const RowChunk& chunk, Scratch& scratch) {
    bf16* const rows = keeps ? x + activation_elements(chunk.packed, hidden)
                             : scratch.take<bf16>(activation_elements(pad_rows(chunk.rows), hidden));
    const int token = gather_chunk(call, tokens, {.pass = Pass::kForward, .check = true}, chunk, rows, scratch);
    if (token >= 0) bad = token;
    if (call.int8) quantize(call, rows, hidden, chunk, act.int8_x);
    if (call.dims.max_rank()) input_low_rank(call, lora, x, act, chunk, scratch);
  });
  check_finite(call, bad);
  each_node(
      call, "gate, up", [&](int n) { return int(routes.calls.size()) * gate_up_blocks(call, n); },
      [&](int node, int task, Scratch& scratch) {
        const int blocks = gate_up_blocks(call, node);
        gate_up_block(call, lora, x, act, node, routes.calls[task / blocks], task % blocks, scratch);
      });
  if (call.pair(Projection::kDown))
    each_node(
        call, "lora A h", [&](int) { return int(routes.chunks.size()); },
        [&](int node, int task, Scratch& scratch) {
          hidden_low_rank(call, lora, act, node, routes.chunks[task], scratch);
        });
}

void forward(Call& call, const TokenRows& hidden, void* out, Saved* saved, bool retain) {
  plan(call, CallWork::forward(retain));
  const PackedLora lora = pack_lora(call);
  const Activations act = place_activations(call, retain ? saved : nullptr);
  if (saved) {
    saved->retained = retain;
    std::copy_n(call.dims.ranks, kProjections, saved->ranks);
  }
  const std::vector<bf16*> y = place_rows(call);
  if (call.by_expert) {
    forward_by_expert(call, hidden, act, y[0]);
  } else {
    gate_up(call, lora, hidden, act);
    if (call.int8)
      each_node(
          call, "quantize h", [&](int) { return int(call.routes.chunks.size()); },
          [&](int node, int task, Scratch&) { quantize_h(call, act, node, call.routes.chunks[task]); });
    const int blocks = hidden_blocks(call);
    each_node(
        call, "down", [&](int) { return int(call.routes.calls.size()) * blocks; },
        [&](int node, int task, Scratch& scratch) {
          down_block(call, lora, act, node, call.routes.calls[task / blocks], task % blocks, y[node], scratch);
        });
  }
  combine(call, y, true, out, hidden.dtype);
}

}  // namespace ktft
