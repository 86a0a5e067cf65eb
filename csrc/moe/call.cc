#include "moe/call.h"

#include <algorithm>

namespace ktft {

CallDims dims_of(const Call& call) {
  CallDims dims{.shape = call.weights.shape(),
                .widths = PackedExperts::widths(call.weights.shape(), call.weights.nodes()),
                .biases = call.weights.biases(),
                .int8 = call.int8,
                .drops = call.lora && call.lora->drops(),
                .packs_lora = call.lora && !call.lora->kept,
                .counts = RowCounts::of(call.routes)};
  for (int p = 0; p < kProjections; p++)
    if (const LoraPair* pair = call.pair(Projection(p))) dims.ranks[p] = pair->rank();
  if (!call.adapters) return dims;
  dims.counts.operand_rows = call.adapters->packed_rows;
  dims.counts.adapters = call.adapters->most;
  for (const int adapter : call.adapters->of_slot)
    for (int p = 0; p < kProjections; p++)
      if (const LoraPair* pair = call.adapters->loras[adapter]->pair(Projection(p)))
        dims.ranks[p] = std::max(dims.ranks[p], pair->rank());
  return dims;
}

void plan(Call& call, CallWork work) {
  constexpr int kPerThread = 4, kLeast = 64;
  Runtime& rt = call.runtime;
  if (!rt.workspace) rt.workspace = std::make_shared<Workspace>(rt.pool.nodes(), rt.pool.threads());
  call.dims = dims_of(call);
  call.by_expert = runs_by_expert(call.dims, rt.pool.threads());
  const int calls = int(call.routes.calls.size()), wanted = kPerThread * rt.pool.threads();
  call.block = kMaxOutputs;
  while (!call.by_expert && call.block > kLeast &&
         calls * ceil_div(call.weights.shape().intermediate, call.block) < wanted)
    call.block /= 2;
  call.sizes = workspace_sizes(call.dims, work, call.by_expert);
  for (Scratch& scratch : rt.scratch) scratch.reserve(scratch_size(call.dims));
  if (!call.by_expert) return;
  for (Scratch& memory : rt.workspace->expert_memory) memory.reserve(expert_memory_size(call.dims));
}

void run_gemm(const Call& call, Format format, Pass pass, const GemmArgs& args) {
  find_gemm(call.runtime.isa, format, pass)(args);
}

void count_weights(const Call& call, Pass pass, const GemmArgs& args) {
  const FormatInfo& format = info(call.weights.format());
  int64_t bytes = 0;
  for (int i = 0; i < args.count; i++) {
    const GemmTerm& term = args.terms[i];
    const int first = term.out_begin / format.tile_cols,
              end = ceil_div(term.out_begin + args.out_count, format.tile_cols);
    const int64_t tiles = pass == Pass::kForward ? int64_t(args.out_count / kTileRows) * term.w->col_tiles()
                                                 : int64_t(term.w->rows / kTileRows) * (end - first);
    bytes += tiles * format.tile_bytes;
  }
  call.runtime.weight_bytes.fetch_add(bytes, std::memory_order_relaxed);
}

void each_chunk(const Call& call, const char* name, const std::function<void(const RowChunk&, Scratch&)>& fn) {
  Runtime& rt = call.runtime;
  const Phase phase(rt.phases, name);
  rt.pool.run(int(call.routes.chunks.size()), [&](int task, int thread) {
    rt.scratch[thread].reset();
    fn(call.routes.chunks[task], rt.scratch[thread]);
  });
}

void each_block(const Call& call, const char* name, const std::vector<RowChunk>& parts, BlockCount blocks,
                const std::function<void(int, const RowChunk&, int, Scratch&)>& fn) {
  Runtime& rt = call.runtime;
  const Phase phase(rt.phases, name);
  std::vector<int> counts(rt.pool.nodes(), 0);
  for (int n = 0; n < call.weights.nodes(); n++) counts[n] = int(parts.size()) * blocks(call, n);
  rt.pool.run(counts, [&](int node, int task, int thread) {
    const int each = blocks(call, node);
    rt.scratch[thread].reset();
    fn(node, parts[task / each], task % each, rt.scratch[thread]);
  });
}

}  // namespace ktft
