#include "moe/by_expert.h"

#include <algorithm>
#include <atomic>

#include "moe/backward.h"
#include "moe/w8a8.h"

namespace ktft {
namespace {

// Runs fn(rows, local, memory, scratch) for every expert, the longest first. `local` are the same rows in memory of the
// thread's own, where they begin at 0.
template <class Fn>
void each_expert(const Call& call, const char* name, const Fn& fn) {
  Runtime& rt = call.runtime;
  const Phase phase(rt.phases, name);
  std::vector<RowChunk> order = call.routes.experts;
  std::stable_sort(order.begin(), order.end(), [](const RowChunk& a, const RowChunk& b) { return a.rows > b.rows; });
  rt.pool.run(int(order.size()), [&](int task, int thread) {
    const RowChunk& rows = order[task];
    RowChunk local = rows;
    local.packed = 0;
    rt.expert_memory[thread].reset();
    fn(rows, local, rt.expert_memory[thread], rt.scratch[thread]);
  });
}

template <class Fn>
void each_chunk_of(const RowChunk& rows, Scratch& scratch, const Fn& fn) {
  for (int at = 0; at < rows.rows; at += Routes::kChunkRows) {
    scratch.reset();
    fn(RowChunk{rows.slot, rows.expert, rows.begin + at, std::min(Routes::kChunkRows, rows.rows - at), at});
  }
}

template <class Fn>
void each_block(int blocks, Scratch& scratch, const Fn& fn) {
  for (int block = 0; block < blocks; block++) {
    scratch.reset();
    fn(block);
  }
}

bf16* take(Scratch& memory, const RowChunk& rows, int cols) {
  return memory.take<bf16>(activation_elements(pad_rows(rows.rows), cols));
}

LowRank take_low_rank(const Call& call, Projection p, const LowRank& shared, const RowChunk& rows, Scratch& memory) {
  const LoraPair* const pair = call.pair(p);
  return {shared.rows, pair ? take(memory, rows, split_rank(pair->rank())) : nullptr};
}

Int8Rows take_int8(Scratch& memory, const RowChunk& rows, int cols) {
  const int padded = pad_rows(rows.rows);
  return {memory.take<int8_t>(int8_bytes(padded, cols)), memory.take<float>(size_t(padded))};
}

// Gate, up and h of one expert. Returns where they are.
Activations expert_gate_up(const Call& call, const PackedLora& lora, const TokenRows& hidden, const Activations& act,
                           const RowChunk& rows, const RowChunk& local, std::atomic<int>& bad, Scratch& memory,
                           Scratch& scratch) {
  const int width = call.weights.width(0);
  const size_t at = activation_elements(rows.packed, width);
  const Activations::PerNode& shared = act.nodes[0];
  bf16* const x = take(memory, rows, call.weights.shape().hidden);
  Activations own;
  own.nodes = {{shared.gate ? shared.gate + at : nullptr, shared.up ? shared.up + at : nullptr,
                take(memory, rows, width), take_low_rank(call, Projection::kDown, shared.down, rows, memory)}};
  if (call.int8) {
    own.int8_x = take_int8(memory, rows, call.weights.shape().hidden);
    own.nodes[0].int8_h = take_int8(memory, rows, width);
  }
  for (Projection p : {Projection::kGate, Projection::kUp})
    own.low_rank[int(p)] = take_low_rank(call, p, act.low_rank[int(p)], rows, memory);
  each_chunk_of(local, scratch, [&](const RowChunk& chunk) {
    bf16* const at = x + activation_elements(chunk.packed, call.weights.shape().hidden);
    const int token = gather_chunk(call, hidden, {Pass::kForward, true, false}, chunk, at, scratch);
    if (token >= 0) bad = token;
    if (call.int8) quantize(call, at, call.weights.shape().hidden, chunk, own.int8_x);
    input_low_rank(call, lora, x, own, chunk, scratch);
  });
  each_block(gate_up_blocks(call, 0), scratch,
             [&](int block) { gate_up_block(call, lora, x, own, 0, local, block, scratch); });
  if (call.pair(Projection::kDown))
    each_chunk_of(local, scratch, [&](const RowChunk& chunk) { hidden_low_rank(call, lora, own, 0, chunk, scratch); });
  if (call.int8) each_chunk_of(local, scratch, [&](const RowChunk& chunk) { quantize_h(call, own, 0, chunk); });
  return own;
}

}  // namespace

void forward_by_expert(const Call& call, const TokenRows& hidden, const Activations& act, bf16* y) {
  std::atomic<int> bad{-1};
  each_expert(call, "experts", [&](const RowChunk& rows, const RowChunk& local, Scratch& memory, Scratch& scratch) {
    const PackedLora lora = pack_expert_lora(call, rows.slot, memory, scratch);
    const Activations own = expert_gate_up(call, lora, hidden, act, rows, local, bad, memory, scratch);
    each_block(hidden_blocks(call), scratch,
               [&](int block) { down_block(call, lora, own, 0, local, block, y, scratch); });
  });
  check_finite(call, bad);
}

void backward_by_expert(const Call& call, const Activations* recompute, const Gradients& at, const TokenRows& hidden,
                        const TokenRows& dy) {
  std::atomic<int> bad{-1};
  const int width = call.weights.width(0);
  if (call.lora) zero_idle_gradients(call);
  each_expert(call, "experts", [&](const RowChunk& rows, const RowChunk& local, Scratch& memory, Scratch& scratch) {
    Gradients own = at;
    Gradients::PerNode& node = own.nodes[0];
    const PackedLora lora = pack_expert_lora(call, rows.slot, memory, scratch);
    const size_t used = memory.used();
    if (recompute) expert_gate_up(call, lora, hidden, *recompute, rows, local, bad, memory, scratch);
    memory.reset(used);
    node.gate += activation_elements(rows.packed, width);
    node.up += activation_elements(rows.packed, width);
    node.h = call.pair(Projection::kDown) ? take(memory, rows, width) : nullptr;
    for (Projection p : {Projection::kGate, Projection::kUp}) {
      node.grad[int(p)] = take(memory, rows, width);
      node.low_rank[int(p)] = take_low_rank(call, p, node.low_rank[int(p)], rows, memory);
    }
    own.dy = take(memory, rows, call.weights.shape().hidden);
    own.low_rank_dy = take_low_rank(call, Projection::kDown, own.low_rank_dy, rows, memory);
    each_chunk_of(local, scratch, [&](const RowChunk& chunk) { gather_dy(call, lora, dy, own, chunk, scratch); });
    each_block(intermediate_blocks(call, 0), scratch,
               [&](int block) { intermediate_block(call, lora, own, 0, local, block, scratch); });
    each_chunk_of(local, scratch, [&](const RowChunk& chunk) { grad_low_rank(call, lora, own, 0, chunk, scratch); });
    each_block(hidden_blocks(call), scratch,
               [&](int block) { hidden_block(call, lora, own, 0, local, block, scratch); });
    if (call.lora) expert_gradients(call, own, hidden, local, memory, scratch);
  });
}

size_t expert_bytes(const Call& call) {
  const ExpertShape& shape = call.weights.shape();
  int rows = 0;
  for (const RowChunk& expert : call.routes.experts) rows = std::max(rows, pad_rows(expert.rows));
  const int places = call.lora ? split_rank(call.lora->max_rank()) : 0;
  // backward: LoRA; dy; d gate, d up, h; three operands; transposed lows of six gradients
  const size_t elements = activation_elements(rows, shape.hidden) + 3 * activation_elements(rows, shape.intermediate) +
                          3 * activation_elements(rows, places) + 6 * activation_elements(places, rows) +
                          expert_lora_elements(call);
  const size_t int8 = int8_bytes(rows, shape.hidden) + int8_bytes(rows, shape.intermediate) + 2 * rows * sizeof(float);
  return elements * sizeof(bf16) + (call.int8 ? int8 : 0) + 4096;
}

}  // namespace ktft
