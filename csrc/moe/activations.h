// The intermediate results of one call: where they are, and which of them are kept from forward to backward.
#pragma once

#include "moe/call.h"

namespace ktft {

// Pointers to one call's intermediate results.
struct Activations {
  struct PerNode {
    bf16* gate = nullptr;  // [packed rows, width], before the activation; null if nothing needs it after the call
    bf16* up = nullptr;    // likewise
    bf16* h = nullptr;     // [packed rows, width], in the forward GEMM's layout
    LowRank down;          // this node's part of A_down h
    Int8Rows int8_h{};
  };
  std::vector<PerNode> nodes;
  LowRank low_rank[2];  // A_gate x, A_up x
  Int8Rows int8_x{};
};

// What `retain` keeps from forward to backward. `recompute` keeps only the routes.
struct Saved {
  Saved(std::shared_ptr<Runtime> runtime, uint64_t layer) : runtime(std::move(runtime)), layer(layer) {}
  ~Saved();

  std::shared_ptr<Runtime> runtime;  // to which the buffers are returned
  uint64_t layer;                    // number of the layer within the process; no other layer may use this
  Routes routes;
  bool retained = false;
  int ranks[kProjections] = {};  // of the LoRA whose results were retained, 0 without LoRA
  struct PerNode {
    NodeBuffer gate, up, low_rank_down;
  };
  std::vector<PerNode> nodes;
  NodeBuffer low_rank[2];

  size_t bytes() const;
};

// What `retain` keeps is in `saved` if it is given, all else in the workspace.
Activations place_activations(const Call& call, Saved* saved);

// y [rows, hidden] of each node.
std::vector<bf16*> place_rows(const Call& call);

}  // namespace ktft
