// Forward pass of one layer's routed experts, and the parts of it that backward shares.
#pragma once

#include "moe/lora.h"
#include "moe/weights.h"

namespace ktft {

struct Call {
  Runtime& runtime;
  const PackedExperts& weights;
  const Routes& routes;
  const float* top_k_weights;  // [tokens, top_k]
  const Lora* lora;            // or null
  Swiglu swiglu;
  const char* name;        // the layer, for messages
  bool int8 = false;       // activations: see w8a8.h
  int block = 0;           // outputs of one GEMM call
  bool by_expert = false;  // each expert's whole pass is one task; or every step of it is a phase of all experts

  const VectorKernels& vec() const { return runtime.vec(); }
  const LoraPair* pair(Projection p) const { return lora ? lora->pair(p) : nullptr; }
  float row_weight(int row) const { return top_k_weights[routes.row_route[row]]; }
};

// Where one call's intermediate results lie, padded as Routes::packed_rows; gate and up are null when nothing needs
// them after the call.
struct Activations {
  struct PerNode {
    bf16 *gate, *up;  // [packed rows, width], before the activation
    bf16* h;          // the same, as the forward GEMM takes it
    LowRank down;     // this node's part of A_down h
    Int8Rows int8_h{};
  };
  std::vector<PerNode> nodes;
  LowRank low_rank[2];  // A_gate x, A_up x
  Int8Rows int8_x{};
};

// Sets block and by_expert. As many outputs a GEMM call as leave every thread several calls: large ones read tokens
// from memory less often. Experts so small that all of their activations stay in one core's L2, and so many that they
// keep every thread busy, are done one by one.
void plan(Call& call);

// What `retain` keeps from forward to backward; empty with `recompute`.
struct Saved {
  Saved(std::shared_ptr<Runtime> runtime, uint64_t layer) : runtime(std::move(runtime)), layer(layer) {}
  ~Saved();
  Saved(const Saved&) = delete;
  Saved& operator=(const Saved&) = delete;

  std::shared_ptr<Runtime> runtime;  // takes the buffers back
  uint64_t layer;                    // its number among the process's: no other can use this
  Routes routes;
  bool retained = false;
  int ranks[kProjections] = {};  // of what was retained, 0 without LoRA
  struct PerNode {
    NodeBuffer gate, up, low_rank_down;
  };
  std::vector<PerNode> nodes;
  NodeBuffer low_rank[2];

  size_t bytes() const;
};

// Tokens and gradients as they come from torch.
struct TokenRows {
  const void* data;  // [tokens, hidden]
  Dtype dtype;
};
// Columns [col, col + cols) of one token as bf16: where they lie, or in `out`; spare [cols] is for fp16.
const bf16* bf16_row(const Call& call, const TokenRows& tokens, int token, int col, int cols, bf16* out, float* spare);

// How rows are gathered.
struct Gather {
  Pass pass;                   // forward: as the forward GEMM takes them
  bool check;                  // look for NaN and Inf
  bool scaled;                 // by down's row scales, if the format has them
  float* bias_dots = nullptr;  // row by row of the call: <token, down's bias>; or null
};
// One chunk of rows -> `out`, its first strip. Returns a token with NaN or Inf, or -1.
int gather_chunk(const Call& call, const TokenRows& tokens, const Gather& how, const RowChunk& chunk, bf16* out,
                 Scratch& scratch);
// Throws when `token` is one.
void check_finite(const Call& call, int token);

// Buffers in `saved` when it is given, else in the workspace.
Activations place_activations(const Call& call, Saved* saved, bool keep_gate_up);

// The parts of the forward pass, each for some rows and, of outputs, one block of columns. `x` [packed rows, hidden]
// is as the forward GEMM takes it, and null when only int8_x counts.
void input_low_rank(const Call& call, const PackedLora& lora, const bf16* x, const Activations& act,
                    const RowChunk& chunk, Scratch& scratch);
void gate_up_block(const Call& call, const PackedLora& lora, const bf16* x, const Activations& act, int node,
                   const RowChunk& rows, int block, Scratch& scratch);
void hidden_low_rank(const Call& call, const PackedLora& lora, const Activations& act, int node, const RowChunk& chunk,
                     Scratch& scratch);
void down_block(const Call& call, const PackedLora& lora, const Activations& act, int node, const RowChunk& rows,
                int block, bf16* y, Scratch& scratch);
int gate_up_blocks(const Call& call, int node);
int hidden_blocks(const Call& call);

// gate, up (biases and LoRA included), h, and the down projection's A h.
void gate_up(const Call& call, const PackedLora& lora, const TokenRows& hidden, const Activations& act);

// y [rows, hidden] of each node.
std::vector<bf16*> place_rows(const Call& call);
// out [tokens, hidden] = every token's rows of every node's y, times the routing weights if `weighted`.
void combine(const Call& call, const std::vector<bf16*>& y, bool weighted, void* out, Dtype dtype);

void forward(const Call& call, const TokenRows& hidden, void* out, Saved* saved, bool retain);

// Makes every thread's scratch large enough for a call.
void reserve_scratch(const Call& call);

void run_gemm(const Call& call, Format format, Pass pass, const GemmArgs& args);
// Adds the packed weights that a product of the experts' own reads to the runtime's count.
void count_weights(const Call& call, Pass pass, const GemmArgs& args);

// Runs fn(chunk, scratch) for all chunks, as one phase.
void each_chunk(const Call& call, const char* phase, const std::function<void(const RowChunk&, Scratch&)>& fn);
// Runs fn(node, task, scratch) for count(node) tasks on each node of the weights, as one phase.
void each_node(const Call& call, const char* phase, const std::function<int(int)>& count,
               const std::function<void(int, int, Scratch&)>& fn);

}  // namespace ktft
