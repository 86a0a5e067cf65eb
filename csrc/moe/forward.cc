#include <algorithm>
#include <atomic>
#include <functional>

#include "moe/passes.h"
#include "moe/steps.h"
#include "moe/w8a8.h"

namespace ktft {

void gate_up(const Call& call, const PackedLora& lora, const TokenRows& tokens, const Activations& act) {
  // With W8A8 and no LoRA, rows are quantized at once and need not be kept: they never leave L2
  const bool keeps = !call.int8 || call.dims.max_rank();
  bf16* const x = keeps ? call.workspace().x.get<bf16>(call.sizes.x) : nullptr;
  const ForwardSteps steps{call, lora, act, x};
  std::atomic<int> bad{-1};
  each_chunk(call, "gather",
             [&](const RowChunk& chunk, Scratch& scratch) { steps.gather_x(tokens, chunk, bad, scratch); });
  check_finite(call, bad);
  each_block(call, "gate, up", call.routes.calls, gate_up_blocks,
             std::bind_front(&ForwardSteps::gate_up_block, &steps));
  if (call.has_lora(Projection::kDown))
    each_block(
        call, "lora A h", call.routes.chunks, one_block,
        [&](int node, const RowChunk& chunk, int, Scratch& scratch) { steps.hidden_low_rank(node, chunk, scratch); });
}

void forward(Call& call, const TokenRows& hidden, void* out, Saved* saved, bool retain) {
  if (!saved && runs_few_rows(call)) return forward_few_rows(call, hidden, out);
  plan(call, forward_work(retain));
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
      each_block(call, "quantize h", call.routes.chunks, one_block,
                 [&](int node, const RowChunk& chunk, int, Scratch&) { quantize_h(call, act, node, chunk); });
    const ForwardSteps steps{call, lora, act, nullptr};
    each_block(call, "down", call.routes.calls, hidden_blocks,
               [&](int node, const RowChunk& rows, int block, Scratch& scratch) {
                 steps.down_block(node, rows, block, y[node], scratch);
               });
  }
  combine(call, y, true, out, hidden.dtype);
}

}  // namespace ktft
