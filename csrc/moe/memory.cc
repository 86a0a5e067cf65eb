#include "moe/memory.h"

#include <algorithm>
#include <cmath>

namespace ktft {
namespace {

constexpr Projection kDown = Projection::kDown;

size_t activation_bytes(int64_t rows, int64_t cols) { return activation_elements(rows, int(cols)) * sizeof(bf16); }

int64_t padded(int64_t rows) { return (rows + kRowPad - 1) / kRowPad * kRowPad; }

}  // namespace

RowCounts RowCounts::of(const Routes& routes) {
  RowCounts counts{.rows = routes.rows,
                   .packed_rows = routes.packed_rows,
                   .experts = int64_t(routes.active.size()),
                   .operand_rows = routes.packed_rows,
                   .calls = int64_t(routes.calls.size())};
  for (const RowChunk& expert : routes.experts) counts.longest = std::max<int64_t>(counts.longest, expert.rows);
  return counts;
}

RowCounts RowCounts::expected(int64_t rows, double experts) {
  const double mean = double(rows) / std::max(experts, 1.);
  RowCounts counts{.rows = rows, .experts = std::lround(experts)};
  counts.packed_rows = padded(std::lround(experts * std::max(mean + (kRowPad - 1) / 2., double(kRowPad))));
  counts.operand_rows = counts.packed_rows;
  counts.longest = std::min(rows, std::lround(mean + 3 * std::sqrt(mean)));
  counts.calls = counts.experts * ceil_div(int(counts.longest), kMaxTokens);
  return counts;
}

int CallDims::max_rank() const { return *std::max_element(ranks, ranks + kProjections); }

size_t CallDims::lora_elements() const {
  size_t places = 0;
  for (int rank : ranks) places += size_t(split_rank(rank));
  return places * size_t(shape.hidden + shape.intermediate);
}

bool runs_by_expert(const CallDims& dims, int threads) {
  constexpr int kPerThread = 4;
  constexpr int64_t kExpertBytes = int64_t(2) << 20;  // an L2 cache
  const RowCounts& counts = dims.counts;
  const int64_t largest = counts.longest * (dims.shape.hidden + dims.shape.intermediate) * int64_t(sizeof(bf16));
  return dims.widths.size() == 1 && counts.calls == counts.experts && counts.experts >= kPerThread * threads &&
         largest <= kExpertBytes;
}

Buffers<size_t> workspace_sizes(const CallDims& dims, CallWork work, bool by_expert) {
  const RowCounts& counts = dims.counts;
  const int hidden = dims.shape.hidden;
  const int64_t packed = by_expert ? 0 : counts.packed_rows;  // rows that are not in the threads' expert memory
  // Sets the sizes of A x or, if not `forward`, of B^T dy
  const auto set_low_rank = [&](auto& at, int p, bool forward) {
    if (!dims.ranks[p]) return;
    if (work & (forward ? kKeepsLowRank : kGradients)) at.low_rank[p] = low_rank_size(dims, Projection(p));
    if (work & (forward ? kActivations : kGradients))
      at.low_rank_operand[p] = activation_bytes(by_expert ? 0 : counts.operand_rows, split_rank(dims.ranks[p]));
  };
  Buffers<size_t> sizes;
  if ((work & kActivations) && (!dims.int8 || dims.max_rank())) sizes.x = activation_bytes(packed, hidden);
  if (dims.packs_lora && !by_expert) sizes.lora = size_t(counts.experts) * dims.lora_elements() * sizeof(bf16);
  if (dims.int8) {
    sizes.x_codes = int8_codes_size(packed, hidden);
    sizes.x_scales = size_t(packed) * sizeof(float);
  }
  if (work & kGradients) {
    sizes.dy = activation_bytes(packed, hidden);
    if (dims.biases) sizes.bias_dots = size_t(counts.rows) * sizeof(float);
    // Every projection has two gradients
    for (int rank : dims.ranks)
      if (!by_expert)
        sizes.transposed += 2 * size_t(split_rank(rank)) * (packed + kStripPad * counts.experts) * sizeof(bf16);
  }
  for (int p = 0; p < kProjections; p++) set_low_rank(sizes, p, Projection(p) != kDown);
  for (size_t n = 0; n < dims.widths.size(); n++) {
    const int width = dims.widths[n];
    NodeBuffers<size_t> node;
    node.h = activation_bytes(packed, width);
    node.y = size_t(counts.rows) * hidden * sizeof(bf16);
    if (work & kKeepsGateUp) {
      node.up = gate_up_size(dims, int(n));
      node.gate = dims.shape.gated ? node.up : 0;
    }
    if (dims.int8) {
      node.h_codes = int8_codes_size(packed, width);
      node.h_scales = size_t(packed) * sizeof(float);
    }
    if (work & kGradients) {
      node.grad[1] = activation_bytes(packed, width);
      node.grad[0] = dims.shape.gated ? node.grad[1] : 0;
      node.weight_grads = size_t(counts.rows) * ceil_div(width, kDotCols) * sizeof(float);
    }
    for (int p = 0; p < kProjections; p++) set_low_rank(node, p, Projection(p) == kDown);
    sizes.nodes.push_back(node);
  }
  return sizes;
}

size_t lora_scratch_size(const CallDims& dims) {
  if (!dims.max_rank()) return 0;
  const size_t places = size_t(split_rank(dims.max_rank())), most = size_t(padded(dims.counts.longest));
  const size_t widest = size_t(std::max(dims.shape.hidden, dims.shape.intermediate));
  const size_t packing = widest * kRankBlock * 4 + places * kTileRows * (4 + 2 * 2);
  const size_t product = Routes::kChunkRows * (kMaxOutputs * 4 + places * 2) + kGemmScratch;
  const size_t transposing = most * (4 + 4 * kRankBlock);
  const size_t kept_chunk = dims.drops ? activation_elements(Routes::kChunkRows, int(widest)) * 2 : 0;
  const size_t kept_block =
      activation_elements(int64_t(most), kMaxOutputs) * 2 + size_t(kTileRows + 2) * kMaxOutputs * 2;
  const size_t gradient = kept_block + size_t(kMaxTokens) * kMaxOutputs * 4 + kGemmScratch;
  return std::max({packing, product + kept_chunk, transposing, gradient}) + 4096;
}

size_t scratch_size(const CallDims& dims) {
  const size_t hidden = size_t(dims.shape.hidden);
  const size_t gemm = kGemmScratch + size_t(2) * kMaxTokens * kMaxOutputs * sizeof(float) + kMaxTokens * 8;
  // The results of all but one of the adapters are added to those of the product
  const size_t added = dims.counts.adapters > 1 ? size_t(kMaxTokens) * kMaxOutputs * sizeof(float) : 0;
  const size_t gathering = hidden * (kTileRows * 2 * sizeof(bf16) + 2 * sizeof(float)) + lora_scratch_size(dims) +
                           (dims.int8 ? activation_bytes(Routes::kChunkRows, int64_t(hidden)) : 0);
  return std::max(gemm + added, gathering) + 4096;
}

size_t expert_memory_size(const CallDims& dims) {
  const int64_t rows = padded(dims.counts.longest), places = split_rank(dims.max_rank());
  const size_t operands = 3 * size_t(std::max<int64_t>(dims.counts.adapters, 1)) * activation_bytes(rows, places);
  // Backward needs the most: LoRA; dy; d gate, d up, h; three operands; six gradients' transposed low-rank rows
  const size_t bytes = dims.lora_elements() * sizeof(bf16) + activation_bytes(rows, dims.shape.hidden) +
                       3 * activation_bytes(rows, dims.shape.intermediate) + operands +
                       6 * activation_bytes(places, rows);
  const size_t int8 = int8_codes_size(rows, dims.shape.hidden) + int8_codes_size(rows, dims.shape.intermediate) +
                      2 * size_t(rows) * sizeof(float);
  return bytes + (dims.int8 ? int8 : 0) + 4096;
}

size_t int8_codes_size(int64_t rows, int cols) { return size_t(rows / kTileRows * int8_strip_bytes(cols)); }

size_t gate_up_size(const CallDims& dims, int node) {
  return activation_bytes(dims.counts.packed_rows, dims.widths[node]);
}

size_t low_rank_size(const CallDims& dims, Projection p) {
  return size_t(dims.counts.rows) * dims.ranks[int(p)] * sizeof(float);
}

LayerMemory layer_memory(const CallDims& dims, int threads, Keep keep) {
  const bool retained = keep == Keep::kActivations, by_expert = runs_by_expert(dims, threads);
  CallWork work = forward_work(retained);
  if (keep != Keep::kNothing) work |= backward_work(retained);
  LayerMemory memory{.workspace = threads * scratch_size(dims), .retained = 0};
  if (by_expert) memory.workspace += threads * expert_memory_size(dims);
  workspace_sizes(dims, work, by_expert).each([&](size_t bytes) { memory.workspace += bytes; });
  if (!retained) return memory;
  for (Projection p : kGateUp) memory.retained += low_rank_size(dims, p);
  for (int n = 0; n < int(dims.widths.size()); n++)
    memory.retained += dims.shape.inputs().size() * gate_up_size(dims, n) + low_rank_size(dims, kDown);
  return memory;
}

size_t workspace_bytes(const Runtime& runtime) {
  size_t total = 0;
  const auto add = [&](const auto& buffer) { total += buffer.bytes(); };
  for (const Scratch& scratch : runtime.scratch) add(scratch);
  if (!runtime.workspace) return total;
  runtime.workspace->each(add);
  add(runtime.workspace->few_rows);
  for (const Scratch& memory : runtime.workspace->expert_memory) add(memory);
  return total;
}

}  // namespace ktft
