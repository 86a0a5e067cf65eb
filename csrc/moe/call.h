// One call of a layer, forward or backward: what it works on, how its work is divided, and how its products are run.
#pragma once

#include <functional>

#include "moe/memory.h"

namespace ktft {

struct Call {
  Runtime& runtime;
  const PackedExperts& weights;
  const Routes& routes;
  const float* top_k_weights = nullptr;  // [tokens, top_k]
  const Lora* lora = nullptr;            // of all tokens; null without LoRA
  const Adapters* adapters = nullptr;    // of single tokens, in place of `lora`; in forward only
  Swiglu swiglu;
  const char* name;          // the layer's, for messages
  bool int8 = false;         // activations are int8, see w8a8.h
  int activation_bits = 16;  // 8: where StripKernels::bytes says so

  // Set by plan().
  CallDims dims{};
  int block = 0;           // outputs of one GEMM call
  bool by_expert = false;  // each expert's whole pass is one task; otherwise every step is a phase of all experts
  Buffers<size_t> sizes{};

  const VectorKernels& vec() const { return runtime.vec(); }
  Workspace& workspace() const { return *runtime.workspace; }
  const LoraPair* pair(Projection p) const { return lora ? lora->pair(p) : nullptr; }
  bool has_lora(Projection p) const { return dims.ranks[int(p)] > 0; }
  int adapter(int row) const { return adapters->of_token[routes.token(row)]; }
  float row_weight(int row) const { return top_k_weights[routes.row_route[row]]; }
};

// Decides how the call's work is divided, and makes every thread's memory large enough for it. A GEMM call computes as
// many outputs as leave several calls for every thread: large calls read tokens from memory less often.
void plan(Call& call, CallWork work);

CallDims dims_of(const Call& call);

void run_gemm(const Call& call, Format format, Pass pass, const GemmArgs& args);
// Adds the packed weights that one of the experts' own products reads to the runtime's count.
void count_weights(const Call& call, Pass pass, const GemmArgs& args);

// Each runs fn as one phase: for all chunks; or, on each node of the weights, for the blocks of each of `parts`.
void each_chunk(const Call& call, const char* phase, const std::function<void(const RowChunk&, Scratch&)>& fn);
using BlockCount = int (*)(const Call& call, int node);
void each_block(const Call& call, const char* phase, const std::vector<RowChunk>& parts, BlockCount blocks,
                const std::function<void(int node, const RowChunk& rows, int block, Scratch&)>& fn);

}  // namespace ktft
