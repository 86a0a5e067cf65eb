// How many bytes a layer call needs. The calls allocate what these functions say, and planning asks them before a model
// exists.
#pragma once

#include "moe/lora.h"
#include "moe/route.h"
#include "moe/weights.h"
#include "moe/workspace.h"

namespace ktft {

// The rows of a call: routes to this layer's experts.
struct RowCounts {
  int64_t rows = 0;
  int64_t packed_rows = 0;  // the same, with every expert's rows padded to kRowPad
  int64_t experts = 0;      // that have rows
  int64_t longest = 0;      // rows of the expert that has the most
  int64_t calls = 0;        // GEMM calls that they take: experts, and the further parts of those beyond kMaxTokens

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
  int ranks[kProjections] = {};  // of LoRA; 0 where a projection has none
  bool drops = false;            // LoRA has dropout
  bool packs_lora = true;        // the call packs LoRA, if there is any, instead of finding it packed
  RowCounts counts;

  int max_rank() const;
  // Elements of one expert's packed LoRA.
  size_t lora_elements() const;
};

// What a call computes, as far as its buffers depend on it.
struct CallWork {
  bool activations = false;     // h from x: forward, or backward under `recompute`
  bool keeps_low_rank = false;  // of the activations, in the workspace
  bool keeps_gate_up = false;   // likewise
  bool gradients = false;

  static CallWork forward(bool retained) { return {.activations = true, .keeps_low_rank = !retained}; }
  static CallWork backward(bool retained) {
    return {.activations = !retained, .keeps_low_rank = !retained, .keeps_gate_up = !retained, .gradients = true};
  }
  CallWork operator|(const CallWork& other) const;
};

// Whether each expert's whole pass is one task (by_expert.h): where experts are so small that all activations of one
// stay in a core's L2, and so many that they keep every thread busy.
bool runs_by_expert(const CallDims& dims, int threads);

// Bytes of each buffer of the workspace.
Buffers<size_t> workspace_sizes(const CallDims& dims, const CallWork& work, bool by_expert);
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

}  // namespace ktft
