// Forward pass of one layer's routed experts, and the parts of it that backward shares.
#pragma once

#include "moe/lora.h"
#include "moe/weights.h"

namespace ktft {

constexpr int kTokenChunk = kMaxTokens;

struct Call {
  Runtime& runtime;
  const PackedExperts& weights;
  const Routes& routes;
  const float* top_k_weights;  // [tokens, top_k]
  const Lora* lora;            // or null
  const char* name;            // the layer, for messages
  // How the work is cut; from shapes and routing alone, so that no sum depends on the threads.
  int block;   // outputs of one task
  int groups;  // of experts, whose results for one block of hidden are partial sums of their own

  const VectorKernels& vec() const { return runtime.vec(); }
  const LoraPair* pair(Projection p) const { return lora ? lora->pair(p) : nullptr; }
  float row_weight(int row) const { return top_k_weights[routes.row_route[row]]; }
};

// Where one call's intermediate results lie; gate and up are null when nothing needs them after the call.
struct Activations {
  struct PerNode {
    bf16 *gate, *up, *h;   // [rows, width]; gate and up before SiLU
    float* low_rank_down;  // [rows, r]: this node's part of A_down h
  };
  std::vector<PerNode> nodes;
  float* low_rank[2];  // [rows, r]: A_gate x, A_up x
};

// With many rows an expert, blocks are as large as a GEMM call takes, and experts are cut into groups so that there
// are tasks enough; with few, small blocks spread the reading of weights over the threads.
void choose_blocks(Call& call);

// What `retain` keeps from forward to backward; empty with `recompute`.
struct Saved {
  explicit Saved(std::shared_ptr<Runtime> runtime) : runtime(std::move(runtime)) {}
  ~Saved();
  Saved(const Saved&) = delete;
  Saved& operator=(const Saved&) = delete;

  std::shared_ptr<Runtime> runtime;  // takes the buffers back
  Routes routes;
  bool retained = false;
  struct PerNode {
    NodeBuffer gate, up, low_rank_down;
  };
  std::vector<PerNode> nodes;
  NodeBuffer low_rank[2];

  size_t bytes() const;
};

// [tokens, hidden] in any dtype -> bf16 rows [rows, hidden], sorted by expert. With `check`, throws on NaN or Inf.
const bf16* gather(const Call& call, const void* tokens, Dtype dtype, bool check, Growing& out);

// Buffers in `saved` when it is given, else in the workspace.
Activations place_activations(const Call& call, Saved* saved, bool keep_gate_up);

// gate, up (LoRA included), h = SiLU(gate) * up, and the down projection's A h.
void gate_up(const Call& call, const bf16* x, const Activations& act);

// out [tokens, hidden] in `dtype` = sum of every node's partial result.
void combine(const Call& call, void* out, Dtype dtype);

// Adds scaling * low_rank . block to y [rows, cols]: `block` is [r, ld], low_rank rows are contiguous.
void add_low_rank(const VectorKernels& vec, const LoraPair& pair, const float* low_rank, const float* block, int rows,
                  int cols, int64_t ld, float* y);

void forward(const Call& call, const void* hidden, Dtype dtype, void* out, Saved* saved, bool retain);

// Makes every thread's scratch large enough for a call.
void reserve_scratch(const Call& call);

// A GEMM of `rows` rows starting at x with one expert's matrix.
void run_gemm(const Call& call, Pass pass, const PackedMatrix& matrix, int out_begin, int out_count, const bf16* x,
              int64_t ldx, int rows, float* y, bool accumulate, char* scratch);

}  // namespace ktft
