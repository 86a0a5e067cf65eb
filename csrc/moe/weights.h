// The packed experts of one layer, sliced over NUMA nodes along the intermediate dimension.
//
// Node n holds intermediate columns [begin(n), end(n)): those rows of gate and up, those columns of down. Every node's
// partial result adds up to the layer's, so nodes (and, later, processes) share no weights.
#pragma once

#include <string>
#include <vector>

#include "numa/buffer.h"
#include "numa/pool.h"
#include "quant/pack.h"

namespace ktft {

struct ExpertShape {
  int experts, hidden, intermediate;
};

class PackedExperts {
 public:
  // node_ids[n]: the kernel's number of node n, or -1 to leave placement to the kernel.
  PackedExperts(ExpertShape shape, Format format, const std::vector<int>& node_ids);

  const ExpertShape& shape() const { return shape_; }
  Format format() const { return format_; }
  int nodes() const { return int(slices_.size()); }
  int begin(int node) const { return slices_[node].begin; }
  int width(int node) const { return slices_[node].width; }
  size_t bytes() const;
  // Bytes that each of so many nodes would hold.
  static std::vector<size_t> packed_bytes(ExpertShape shape, Format format, int nodes);

  // Packs one expert's projection from a checkpoint tensor: gate and up are [intermediate, hidden], down is
  // [hidden, intermediate]. Throws on a wrong shape and on NaN or Inf.
  void load(Pool& pool, int expert, Projection projection, const SourceMatrix& source);
  bool loaded(int expert, Projection projection) const { return loaded_[expert * kProjections + int(projection)]; }

  // fp32 [rows, cols] of the whole matrix.
  void dequantize(int expert, Projection projection, float* out) const;

  PackedMatrix matrix(int node, int expert, Projection projection) const;

 private:
  struct Slice {
    int begin, width;
    size_t offset[kProjections], scale_offset[kProjections], expert_bytes;
    NodeBuffer memory;
  };
  // Slices without memory, one a node as far as there are columns for it.
  static std::vector<Slice> slices_of(ExpertShape shape, Format format, int nodes);
  void matrix_dims(int node, Projection projection, int& rows, int& cols) const;

  ExpertShape shape_;
  Format format_;
  std::vector<Slice> slices_;
  std::vector<bool> loaded_;
};

}  // namespace ktft
