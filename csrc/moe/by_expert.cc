#include <algorithm>
#include <atomic>

#include "moe/passes.h"
#include "moe/steps.h"
#include "moe/w8a8.h"

namespace ktft {
namespace {

// Runs fn(rows, local, memory, scratch) for every expert, the longest first. `local` are the same rows in the thread's
// own memory, where they begin at 0.
template <class Fn>
void each_expert(const Call& call, const char* name, const Fn& fn) {
  Runtime& rt = call.runtime;
  std::vector<Scratch>& memory = call.workspace().expert_memory;
  const Phase phase(rt.phases, name);
  std::vector<RowChunk> order = call.routes.experts;
  std::stable_sort(order.begin(), order.end(), [](const RowChunk& a, const RowChunk& b) { return a.rows > b.rows; });
  rt.pool.run(int(order.size()), [&](int task, int thread) {
    const RowChunk& rows = order[task];
    RowChunk local = rows;
    local.packed = 0;
    memory[thread].reset();
    fn(rows, local, memory[thread], rt.scratch[thread]);
  });
}

template <class Fn>
void each_chunk_of(const RowChunk& rows, Scratch& scratch, const Fn& fn) {
  for (int at = 0; at < rows.rows; at += Routes::kChunkRows) {
    scratch.reset();
    fn(rows.part(at, Routes::kChunkRows));
  }
}

template <class Fn>
void each_block_of(int blocks, Scratch& scratch, const Fn& fn) {
  for (int block = 0; block < blocks; block++) {
    scratch.reset();
    fn(block);
  }
}

bf16* take(Scratch& memory, const RowChunk& rows, int cols) {
  return memory.take<bf16>(activation_elements(pad_rows(rows.rows), cols));
}

LowRank take_low_rank(const Call& call, Projection p, const LowRank& shared, const RowChunk& rows, Scratch& memory) {
  LowRank own{.rows = shared.rows};
  const int count = call.adapters ? call.adapters->count(rows.slot) : 1;
  if (!call.has_lora(p) || !count) return own;
  const size_t each = activation_elements(pad_rows(rows.rows), split_rank(call.dims.ranks[int(p)]));
  own.operand = memory.take<bf16>(count * each);
  if (call.adapters) own.first = call.adapters->packed[call.adapters->first[rows.slot]];
  return own;
}

Int8Rows take_int8(Scratch& memory, const RowChunk& rows, int cols) {
  const int padded = pad_rows(rows.rows);
  return {memory.take<int8_t>(int8_codes_size(padded, cols)), memory.take<float>(size_t(padded))};
}

// Computes gate, up and h of one expert. Returns where they are.
Activations expert_gate_up(const Call& call, const PackedLora& lora, const TokenRows& hidden, const Activations& act,
                           const RowChunk& rows, const RowChunk& local, std::atomic<int>& bad, Scratch& memory,
                           Scratch& scratch) {
  const int width = call.weights.width(0);
  const size_t at = activation_elements(rows.packed, width);
  const Activations::PerNode& shared = act.nodes[0];
  bf16* const x = take(memory, rows, call.weights.shape().hidden);
  Activations own;
  own.nodes = {{.gate = shared.gate ? shared.gate + at : nullptr,
                .up = shared.up ? shared.up + at : nullptr,
                .h = take(memory, rows, width),
                .down = take_low_rank(call, Projection::kDown, shared.down, rows, memory)}};
  if (call.int8) {
    own.int8_x = take_int8(memory, rows, call.weights.shape().hidden);
    own.nodes[0].int8_h = take_int8(memory, rows, width);
  }
  for (const Projection p : call.weights.shape().inputs())
    own.low_rank[int(p)] = take_low_rank(call, p, act.low_rank[int(p)], rows, memory);
  const ForwardSteps steps{call, lora, own, x};
  each_chunk_of(local, scratch, [&](const RowChunk& chunk) { steps.gather_x(hidden, chunk, bad, scratch); });
  each_block_of(gate_up_blocks(call, 0), scratch, [&](int block) { steps.gate_up_block(0, local, block, scratch); });
  if (call.has_lora(Projection::kDown))
    each_chunk_of(local, scratch, [&](const RowChunk& chunk) { steps.hidden_low_rank(0, chunk, scratch); });
  if (call.int8) each_chunk_of(local, scratch, [&](const RowChunk& chunk) { quantize_h(call, own, 0, chunk); });
  return own;
}

}  // namespace

void forward_by_expert(const Call& call, const TokenRows& hidden, const Activations& act, bf16* y) {
  std::atomic<int> bad{-1};
  each_expert(call, "experts", [&](const RowChunk& rows, const RowChunk& local, Scratch& memory, Scratch& scratch) {
    const PackedLora lora = pack_expert_lora(call, rows.slot, memory, scratch);
    const Activations own = expert_gate_up(call, lora, hidden, act, rows, local, bad, memory, scratch);
    const ForwardSteps steps{call, lora, own, nullptr};
    each_block_of(hidden_blocks(call, 0), scratch, [&](int block) { steps.down_block(0, local, block, y, scratch); });
  });
  check_finite(call, bad);
}

void backward_by_expert(const Call& call, bool recompute, const Gradients& at, const TokenRows& hidden,
                        const TokenRows& dy) {
  std::atomic<int> bad{-1};
  const int width = call.weights.width(0);
  if (call.lora) zero_idle_gradients(call);
  each_expert(call, "experts", [&](const RowChunk& rows, const RowChunk& local, Scratch& memory, Scratch& scratch) {
    Gradients own = at;
    Activations::PerNode& kept = own.act.nodes[0];
    Gradients::PerNode& node = own.nodes[0];
    const PackedLora lora = pack_expert_lora(call, rows.slot, memory, scratch);
    const size_t used = memory.used();
    if (recompute) expert_gate_up(call, lora, hidden, at.act, rows, local, bad, memory, scratch);
    memory.reset(used);
    if (kept.gate) kept.gate += activation_elements(rows.packed, width);
    kept.up += activation_elements(rows.packed, width);
    if (call.pair(Projection::kDown)) kept.h = take(memory, rows, width);
    for (const Projection p : call.weights.shape().inputs()) {
      node.grad[int(p)] = take(memory, rows, width);
      node.low_rank[int(p)] = take_low_rank(call, p, node.low_rank[int(p)], rows, memory);
    }
    own.dy = take(memory, rows, call.weights.shape().hidden);
    own.low_rank_dy = take_low_rank(call, Projection::kDown, own.low_rank_dy, rows, memory);
    const BackwardSteps steps{call, lora, own};
    each_chunk_of(local, scratch, [&](const RowChunk& chunk) { steps.gather_dy(dy, chunk, scratch); });
    each_block_of(intermediate_blocks(call, 0), scratch,
                  [&](int block) { steps.intermediate_block(0, local, block, scratch); });
    each_chunk_of(local, scratch, [&](const RowChunk& chunk) { steps.grad_low_rank(0, chunk, scratch); });
    each_block_of(hidden_blocks(call, 0), scratch, [&](int block) { steps.hidden_block(0, local, block, scratch); });
    if (call.lora) expert_gradients(call, own, hidden, local, memory, scratch);
  });
}

}  // namespace ktft
