// The packed experts of one layer, sliced over NUMA nodes along the intermediate dimension: node n has the width(n)
// rows of gate and up, and columns of down, from begin(n) on. The nodes' partial results add up to the layer's.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "numa/buffer.h"
#include "numa/pool.h"
#include "quant/pack.h"

namespace ktft {

struct ExpertShape {
  int experts, hidden, intermediate;
  bool gated = true;

  // Of one expert's matrix: gate and up are [intermediate, hidden], down is [hidden, intermediate]. A gate that experts
  // lack has no rows.
  int rows(Projection p) const {
    if (p == Projection::kGate && !gated) return 0;
    return p == Projection::kDown ? hidden : intermediate;
  }
  // The projections of the layer's input.
  std::span<const Projection> inputs() const { return std::span(kGateUp).subspan(gated ? 0 : 1); }
  int cols(Projection p) const { return p == Projection::kDown ? intermediate : hidden; }
};

class PackedExperts {
 public:
  // node_ids[n] is the operating system's number of node n, or -1 to leave the placement to it.
  PackedExperts(ExpertShape shape, Format format, bool biases, const std::vector<int>& node_ids);

  const ExpertShape& shape() const { return shape_; }
  Format format() const { return format_; }
  int nodes() const { return int(slices_.size()); }
  int begin(int node) const { return slices_[node].begin; }
  int width(int node) const { return slices_[node].width; }
  // The blocks of a node's experts, with all matrices of each, are contiguous.
  size_t expert_bytes(int node) const { return slices_[node].expert_bytes; }
  size_t bytes() const;
  // The widths of the slices when there are `nodes` nodes; fewer slices if there are too few columns for all.
  static std::vector<int> widths(ExpertShape shape, int nodes);
  // Bytes of each slice when there are `nodes` nodes.
  static std::vector<size_t> packed_bytes(ExpertShape shape, Format format, bool biases, int nodes);

  // Packs one expert's projection from a checkpoint tensor. Throws on a wrong shape and on NaN or Inf. Returns whether
  // codes and scales are unchanged.
  bool load(Pool& pool, int expert, Projection projection, const SourceMatrix& source);
  bool loaded(int expert, Projection projection) const { return loaded_[expert * kProjections + int(projection)]; }
  // Sets one expert's bias of one projection, one value for each output, in layers with biases. Throws on NaN and Inf.
  void load_bias(int expert, Projection projection, const float* values);
  bool loaded_bias(int expert, Projection projection) const {
    return loaded_biases_[expert * kProjections + int(projection)];
  }
  bool biases() const { return biases_; }

  // The canonical form, which files use: all tiles of a matrix, strip after strip without padding, then its scales
  // (fp32, by row or by block). It does not depend on nodes, threads or ISA.
  size_t canonical_bytes(Projection projection) const;
  void export_canonical(Pool& pool, int expert, Projection projection, uint8_t* out) const;
  // Replaces load(). Throws on a scale that is NaN or Inf, or not positive if outputs are multiplied by it.
  void import_canonical(Pool& pool, int expert, Projection projection, const uint8_t* in);

  // Write the whole matrix as fp32 [rows, cols], and its bias [rows].
  void dequantize(Pool& pool, int expert, Projection projection, float* out) const;
  void bias(int expert, Projection projection, float* out) const;

  // Only node 0 has down's bias, because the nodes' outputs add up.
  PackedMatrix matrix(int node, int expert, Projection projection) const;

 private:
  struct Slice {
    int begin, width;
    size_t offset[kProjections], scale_offset[kProjections], bias_offset[kProjections], expert_bytes;
    NodeBuffer memory;
  };
  // Slices without memory, one for each node for which there are columns.
  static std::vector<Slice> slices_of(ExpertShape shape, Format format, bool biases, int nodes);
  // Where a node's slice begins in the whole matrix.
  int row_begin(int node, Projection p) const { return p == Projection::kDown ? 0 : begin(node); }
  int col_begin(int node, Projection p) const { return p == Projection::kDown ? begin(node) : 0; }
  static bool has_bias(bool biases, int node, Projection p) { return biases && (node == 0 || p != Projection::kDown); }
  template <class Fn>
  void each_unit(Pool& pool, int expert, Projection projection, const Fn& fn) const;

  ExpertShape shape_;
  Format format_;
  bool biases_;
  std::vector<Slice> slices_;
  std::vector<bool> loaded_, loaded_biases_;
};

}  // namespace ktft
