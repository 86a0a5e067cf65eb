// LoRA on every expert: y += scaling * B (A drop(x)), and its gradients, all by the base GEMMs' kernels.
//
// The kernels multiply bf16, so an fp32 parameter is two of them, high + low, which together keep 16 bits of it. Rank
// index j takes 16 places of a block of 32 for the high parts and 16 for the low ones: `split_rank(r)` places in all.
// Packed for a call are
//   A  [split_rank, in]: forward x A^T gives high and low sums, which are added (low_rank_rows); backward M of d x
//   B  [out, split_rank], divided by the base weight's row scale, so that it adds to products without it: forward M;
//      backward dy B, likewise added
// A product with a low-rank activation as operand has it twice, once for each part of the parameter.
#pragma once

#include <optional>

#include "moe/route.h"
#include "moe/workspace.h"

namespace ktft {

struct Call;
struct KeptLora;

struct LoraMatrix {  // [experts, rows, cols], contiguous
  const void* data;
  Dtype dtype;  // fp32 or bf16
  int rows, cols;
};

struct LoraPair {
  LoraMatrix a, b;  // a [experts, r, in], b [experts, out, r]
  float scaling;
  float* grad_a = nullptr;  // fp32, shapes of a and b; null in forward
  float* grad_b = nullptr;

  int rank() const { return a.rows; }
};

struct Lora {
  std::optional<LoraPair> pairs[kProjections];
  float dropout = 0;
  uint64_t seed = 0;
  const bool* elsewhere = nullptr;       // [experts], in backward: whose gradients are not touched; or null
  std::shared_ptr<const KeptLora> kept;  // all experts' packed, by keep_lora; or null: each call packs its own

  const LoraPair* pair(Projection p) const { return pairs[int(p)] ? &*pairs[int(p)] : nullptr; }
  int max_rank() const;
  bool drops() const { return dropout > 0; }
  float keep_scale() const { return 1.f / (1.f - dropout); }
  // The dropout stream of one route's input to one projection.
  uint64_t key(Projection p, int route) const;
};

constexpr int kRankBlock = 16;
static constexpr int split_rank(int rank) { return (rank + kRankBlock - 1) / kRankBlock * 2 * kRankBlock; }

// A and B of the active experts, or of all, packed; scaling is in B, dropout's factor in A.
struct PackedLora {
  struct Part {
    bf16 *a = nullptr, *b = nullptr;
    size_t a_stride = 0, b_stride = 0;  // from slot to slot, or from expert to expert
  };
  Part parts[kProjections];
  bool all = false;

  PackedMatrix a(const Call& call, Projection p, int slot, int node) const;
  PackedMatrix b(const Call& call, Projection p, int slot, int node) const;
};
// Of all active experts, or nothing where experts are done one by one: then each one's are packed into its thread's
// memory, and are in L2 when they are used.
PackedLora pack_lora(const Call& call);
PackedLora pack_expert_lora(const Call& call, int slot, Scratch& memory, Scratch& scratch);
size_t expert_lora_elements(const Call& call);

// Adapters that many calls of few tokens meet unchanged: packing takes as long as a quarter of an expert's products.
struct KeptLora {
  PackedLora packed;
  NodeBuffer memory;
};
// Packs the active experts', who must be all.
std::shared_ptr<const KeptLora> keep_lora(const Call& call);

// What a low-rank product becomes.
struct LowRank {
  float* rows = nullptr;    // [rows, r], for gradients
  bf16* operand = nullptr;  // [packed rows, split_rank]: L of a GEMM

  const bf16* operand_at(const RowChunk& chunk, int rank) const {
    return operand + activation_elements(chunk.packed, split_rank(rank));
  }
};

// out = x M^T forward, x M backward, for the rows of one chunk; x points at the chunk's first strip.
void low_rank_product(const Call& call, Pass pass, const PackedMatrix& m, int rank, const bf16* x,
                      const RowChunk& chunk, const LowRank& out, Scratch& scratch);

// Zeroes what dropout drops of x [chunk's rows, cols], whose first column is number `first` of the projection's input.
void drop_rows(const Call& call, Projection p, const RowChunk& chunk, bf16* x, int cols, int first, bool turned);
// c += lora, less what dropout drops of it: results of a backward GEMM of the chunk's rows.
void add_dropped(const Call& call, Projection p, const RowChunk& chunk, const float* lora, int cols, int first,
                 float* c);

// The rows of all tokens' L as a gradient's X: [split_rank, packed rows of the expert], times the routing weights when
// `weighted`. `parts` are the nodes' parts of it.
void transpose_low_rank(const Call& call, const std::vector<const float*>& parts, int rank, const RowChunk& expert,
                        bool weighted, bf16* out, Scratch& scratch);

// Scratch of the functions above, in bytes.
size_t lora_scratch(const Call& call);

}  // namespace ktft
