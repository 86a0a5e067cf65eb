// LoRA on every expert: y += scaling * B (A drop(x)), and its gradients. All products use the base GEMMs' kernels.
//
// The kernels multiply bf16, so an fp32 parameter is represented by two bf16 values, high + low, which together keep 16
// bits of it. Rank indices are taken in blocks of 16; each has 32 places, 16 for high and 16 for low parts.
// `split_rank(r)` is the number of places of rank r. For a call, the packed parameters are
//   A  [split_rank, in]: in forward, x A^T gives high and low sums, which are added (low_rank_product); the M of d x
//   B  [out, split_rank], divided by the base weight's row scale, because it is added to products without that scale:
//      the M of y in forward; in backward, dy B gives high and low sums, which are added
// A low-rank activation that is a product's operand is stored twice, once for each part of the parameter.
#pragma once

#include <optional>

#include "moe/route.h"
#include "runtime/runtime.h"

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
  std::optional<LoraPair> pairs[kProjections] = {};
  float dropout = 0;
  uint64_t seed = 0;
  uint64_t first_route = 0;                // of the call, among the routes that have one seed
  const bool* elsewhere = nullptr;         // [experts]: backward leaves the gradients of these alone; or null
  std::shared_ptr<const KeptLora> kept{};  // all experts' parameters packed by keep_lora; null: each call packs its own

  const LoraPair* pair(Projection p) const { return pairs[int(p)] ? &*pairs[int(p)] : nullptr; }
  bool drops() const { return dropout > 0; }
  float keep_scale() const { return 1.f / (1.f - dropout); }
  // The key of the dropout stream for one route's input to one projection.
  uint64_t key(Projection p, int route) const;
};

constexpr int kNoAdapter = -1;

// LoRA of several adapters in one forward: each token has one of them, or none.
struct Adapters {
  std::vector<const Lora*> loras;  // all kept, without dropout
  const int32_t* of_token;         // [tokens]: a number within `loras`, or kNoAdapter
  // The adapters of slot s's rows, ascending, are of_slot[first[s]] to of_slot[first[s + 1] - 1].
  std::vector<int> first{}, of_slot{};
  std::vector<int> packed{};  // for each of of_slot: its first row in buffers of operands, of all its expert's rows
  int packed_rows = 0;        // of these buffers
  int most = 0;               // adapters that one expert's rows have

  // Fills in what depends on the routes.
  void find(const Routes& routes);
  int count(int slot) const { return first[slot + 1] - first[slot]; }
};

constexpr int kRankBlock = 16;
static constexpr int split_rank(int rank) { return (rank + kRankBlock - 1) / kRankBlock * 2 * kRankBlock; }

// Packed A and B of the active experts, or of all. B includes the scaling, A includes dropout's factor.
struct PackedLora {
  struct Part {
    bf16 *a = nullptr, *b = nullptr;
    size_t a_stride = 0, b_stride = 0;  // from one slot to the next; if `all`, from one expert to the next
    int places = 0;                     // split_rank
  };
  Part parts[kProjections];
  bool all = false;

  PackedMatrix a(const Call& call, Projection p, int slot, int node) const;
  PackedMatrix b(const Call& call, Projection p, int slot, int node) const;
};
// Packs the parameters of all active experts, unless the call works expert by expert: then pack_expert_lora packs each
// one's into its thread's memory, so that they are in L2 when they are used.
PackedLora pack_lora(const Call& call);
PackedLora pack_expert_lora(const Call& call, int slot, Scratch& memory, Scratch& scratch);

// Adapters unchanged over many calls of a few tokens, where packing takes as long as a quarter of an expert's products.
struct KeptLora {
  PackedLora packed;
  NodeBuffer memory;
  uint64_t layer = 0;  // number of the layer within the process; no other layer may use this
};
// Packs the parameters of the active experts, which must be all experts.
std::shared_ptr<KeptLora> keep_lora(const Call& call);

// The result of a low-rank product.
struct LowRank {
  float* rows = nullptr;    // [rows, r], for gradients
  bf16* operand = nullptr;  // [packed rows, split_rank]: L of a GEMM; with adapters each one's, see Adapters::packed
  int first = 0;            // the row of Adapters::packed at which `operand` begins

  bf16* operand_at(const RowChunk& chunk, int rank) const {
    return operand + activation_elements(chunk.packed, split_rank(rank));
  }
};

// out = x M^T in forward, x M in backward, for the rows of one chunk. x points at the chunk's first strip. If `adapter`
// is the number of one of the call's adapters, rows of other adapters get zeros.
void low_rank_product(const Call& call, Pass pass, const PackedMatrix& m, int rank, const bf16* x,
                      const RowChunk& chunk, const LowRank& out, Scratch& scratch, int adapter = kNoAdapter);

// Sets dropped elements of x [chunk's rows, cols] to zero; `first` is its first column in the projection's input.
void drop_rows(const Call& call, Projection p, const RowChunk& chunk, bf16* x, int cols, int first, bool turned);
// c += lora without its dropped elements; both are results of a backward GEMM of the chunk's rows.
void add_dropped(const Call& call, Projection p, const RowChunk& chunk, const float* lora, int cols, int first,
                 float* c);

// Makes the expert's rows of L the X of a gradient's product: [split_rank, packed rows of the expert], times the
// routing weights if `weighted`. L is the sum of `parts`, the nodes' parts of it.
void transpose_low_rank(const Call& call, const std::vector<const float*>& parts, int rank, const RowChunk& expert,
                        bool weighted, bf16* out, Scratch& scratch);

}  // namespace ktft
