// The buffers of calls' intermediate results, and how many bytes a call needs: calls allocate what these functions say,
// and planning asks them.
#pragma once

#include "moe/lora.h"
#include "moe/route.h"
#include "moe/weights.h"
#include "runtime/runtime.h"

namespace ktft {

// The buffers that each node has. `rows` are routes sorted by expert, `packed rows` pad every expert's to kRowPad.
template <class Buffer>
struct NodeBuffers {
  Buffer gate{}, up{}, h{};                 // bf16 [packed rows, width]
  Buffer grad[2]{};                         // bf16 [packed rows, width]: d gate, d up, times the row scales
  Buffer h_codes{}, h_scales{};             // Int8Rows of h
  Buffer y{};                               // bf16 [rows, hidden]: outputs in forward, d hidden in backward
  Buffer low_rank[kProjections]{};          // fp32 [rows, r]
  Buffer low_rank_operand[kProjections]{};  // bf16 [packed rows, split_rank]
  Buffer weight_grads{};                    // fp32 [width / kDotCols, rows]
};

// The buffers of a whole layer. Buffer is Growing for the memory, and size_t for its sizes in bytes.
template <class Buffer>
struct Buffers {
  Buffer x{}, dy{};                         // bf16 [packed rows, hidden], gathered
  Buffer x_codes{}, x_scales{};             // Int8Rows of x
  Buffer lora{};                            // see PackedLora
  Buffer low_rank[kProjections]{};          // fp32 [rows, r]
  Buffer low_rank_operand[kProjections]{};  // bf16 [packed rows, split_rank]
  Buffer bias_dots{};                       // fp32 [rows]
  Buffer transposed{};                      // bf16 [split_rank, packed rows] of each LoRA gradient
  std::vector<NodeBuffers<Buffer>> nodes;

  template <class Fn>
  void each(const Fn& fn) const {
    for (const Buffer* b : {&x, &dy, &x_codes, &x_scales, &lora, &bias_dots, &transposed}) fn(*b);
    for (int p = 0; p < kProjections; p++) fn(low_rank[p]), fn(low_rank_operand[p]);
    for (const NodeBuffers<Buffer>& n : nodes) {
      for (const Buffer* b : {&n.gate, &n.up, &n.h, &n.grad[0], &n.grad[1], &n.h_codes, &n.h_scales, &n.y}) fn(*b);
      for (int p = 0; p < kProjections; p++) fn(n.low_rank[p]), fn(n.low_rank_operand[p]);
      fn(n.weight_grads);
    }
  }
};

struct Workspace : Buffers<Growing> {
  Workspace(int node_count, int threads) : expert_memory(threads) { nodes.resize(node_count); }

  Growing few_rows;                    // of few_rows.cc
  std::vector<Scratch> expert_memory;  // one for each thread: activations of the expert it works on (by_expert.cc)
};

// The rows of a call: routes to this layer's experts.
struct RowCounts {
  int64_t rows = 0;
  int64_t packed_rows = 0;   // the same, with every expert's rows padded to kRowPad
  int64_t experts = 0;       // that have rows
  int64_t longest = 0;       // rows of the expert that has the most
  int64_t operand_rows = 0;  // rows of LoRA's operands: packed_rows, or those of Adapters
  int64_t adapters = 1;      // that one expert's rows have at most
  int64_t calls = 0;         // GEMM calls that they take: experts, and the further parts of those beyond kMaxTokens

  static RowCounts of(const Routes& routes);
  // What is to be expected of `rows` routes that reach `experts` experts at random.
  static RowCounts expected(int64_t rows, double experts);
};

// Everything on which the size of a call's buffers depends.
struct CallDims {
  ExpertShape shape;
  std::vector<int> widths;  // columns of the intermediate dimension on each node
  bool biases = false;
  bool int8 = false;             // W8A8
  int ranks[kProjections] = {};  // of LoRA, the largest of all adapters; 0 where a projection has none
  bool drops = false;            // LoRA has dropout
  bool packs_lora = true;        // the call packs LoRA, if there is any, instead of finding it packed
  RowCounts counts;

  int max_rank() const;
  // Elements of one expert's packed LoRA.
  size_t lora_elements() const;
};

// What a call computes, as far as its buffers depend on it: bits that can be joined.
using CallWork = unsigned;
constexpr CallWork kActivations = 1;   // h from x: forward, or backward under `recompute`
constexpr CallWork kKeepsLowRank = 2;  // of the activations, in the workspace
constexpr CallWork kKeepsGateUp = 4;   // likewise
constexpr CallWork kGradients = 8;
constexpr CallWork forward_work(bool retained) { return retained ? kActivations : kActivations | kKeepsLowRank; }
constexpr CallWork backward_work(bool retained) {
  return retained ? kGradients : kGradients | kActivations | kKeepsLowRank | kKeepsGateUp;
}

// Whether each expert's whole pass is one task: where experts are so small that all activations of one stay in a core's
// L2, and so many that they keep every thread busy.
bool runs_by_expert(const CallDims& dims, int threads);

// Bytes of each buffer of the workspace.
Buffers<size_t> workspace_sizes(const CallDims& dims, CallWork work, bool by_expert);
// Bytes of each thread's scratch, and of each thread's expert memory.
size_t scratch_size(const CallDims& dims);
size_t expert_memory_size(const CallDims& dims);
// The part of the scratch that LoRA's functions need.
size_t lora_scratch_size(const CallDims& dims);

// Bytes of the codes in an Int8Rows of padded rows.
size_t int8_codes_size(int64_t rows, int cols);

// Bytes that `retain` keeps from forward to backward: gate or up on one node, and one projection's low-rank rows.
size_t gate_up_size(const CallDims& dims, int node);
size_t low_rank_size(const CallDims& dims, Projection p);

enum class Keep { kNothing, kRoutes, kActivations };  // for backward: none follows, recompute, retain

struct LayerMemory {
  size_t workspace;  // of a runtime after a forward, and a backward unless nothing is kept
  size_t retained;   // by one layer, between them
};
LayerMemory layer_memory(const CallDims& dims, int threads, Keep keep);
// Bytes that a runtime's workspace and its threads' scratch take now.
size_t workspace_bytes(const Runtime& runtime);

}  // namespace ktft
