// Buffers of a layer call's intermediate results. All layers of a runtime share them; they grow to the largest call.
#pragma once

#include <vector>

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

  std::vector<Scratch> expert_memory;  // one for each thread: activations of the expert it works on (by_expert.h)
};

// The runtime's workspace, made at the first call. The caller holds the runtime's mutex.
Workspace& workspace_of(Runtime& runtime);

// Bytes that a runtime's workspace and its threads' scratch take.
size_t workspace_bytes(const Runtime& runtime);

}  // namespace ktft
