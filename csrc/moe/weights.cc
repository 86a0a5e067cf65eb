#include "moe/weights.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace ktft {

std::vector<int> PackedExperts::widths(ExpertShape shape, int nodes) {
  const int units = ceil_div(shape.intermediate, kSliceMultiple), count = std::min(units, nodes);
  std::vector<int> widths;
  for (int n = 0; n < count; n++)
    widths.push_back(std::min(split(units, count, n + 1) * kSliceMultiple, shape.intermediate) -
                     split(units, count, n) * kSliceMultiple);
  return widths;
}

std::vector<PackedExperts::Slice> PackedExperts::slices_of(ExpertShape shape, Format format, bool biases, int nodes) {
  std::vector<Slice> slices;
  int begin = 0;
  for (const int width : widths(shape, nodes)) {
    Slice s{};
    s.begin = begin;
    s.width = width;
    const int n = int(slices.size());
    begin += width;
    shape.intermediate = width;
    for (int p = 0; p < kProjections; p++) {
      const int rows = shape.rows(Projection(p)), cols = shape.cols(Projection(p));
      s.offset[p] = s.expert_bytes;
      s.expert_bytes += size_t(rows / kTileRows) * weight_strip_bytes(format, cols);
      s.scale_offset[p] = s.expert_bytes;
      s.expert_bytes += in_lines(scale_count(format, rows, cols) * sizeof(float));
      s.bias_offset[p] = s.expert_bytes;
      if (has_bias(biases, n, Projection(p))) s.expert_bytes += in_lines(size_t(rows) * sizeof(float));
    }
    slices.push_back(std::move(s));
  }
  return slices;
}

PackedExperts::PackedExperts(ExpertShape shape, Format format, bool biases, const std::vector<int>& node_ids)
    : shape_(shape),
      format_(format),
      biases_(biases),
      slices_(slices_of(shape, format, biases, int(node_ids.size()))),
      loaded_(size_t(shape.experts) * kProjections),
      loaded_biases_(loaded_.size()) {
  for (int n = 0; n < nodes(); n++)
    slices_[n].memory = NodeBuffer(slices_[n].expert_bytes * shape.experts, node_ids[n]);
}

std::vector<size_t> PackedExperts::packed_bytes(ExpertShape shape, Format format, bool biases, int nodes) {
  std::vector<size_t> bytes;
  for (const Slice& s : slices_of(shape, format, biases, nodes)) bytes.push_back(s.expert_bytes * shape.experts);
  return bytes;
}

size_t PackedExperts::bytes() const {
  size_t total = 0;
  for (const Slice& s : slices_) total += s.memory.size();
  return total;
}

PackedMatrix PackedExperts::matrix(int node, int expert, Projection projection) const {
  const Slice& s = slices_[node];
  char* base = s.memory.data() + s.expert_bytes * expert;
  const ExpertShape sliced{.experts = 1, .hidden = shape_.hidden, .intermediate = s.width, .gated = shape_.gated};
  PackedMatrix m{.format = format_,
                 .rows = sliced.rows(projection),
                 .cols = sliced.cols(projection),
                 .tiles = reinterpret_cast<uint8_t*>(base + s.offset[int(projection)]),
                 .strip_bytes = weight_strip_bytes(format_, sliced.cols(projection))};
  float* const scales = reinterpret_cast<float*>(base + s.scale_offset[int(projection)]);
  if (info(format_).row_scaled) m.row_scale = scales;
  if (info(format_).block_scaled) m.block_scale = scales;
  if (has_bias(biases_, node, projection)) m.bias = reinterpret_cast<float*>(base + s.bias_offset[int(projection)]);
  return m;
}

bool PackedExperts::load(Pool& pool, int expert, Projection projection, const SourceMatrix& source) {
  const int rows = shape_.rows(projection), cols = shape_.cols(projection);
  KTFT_CHECK(rows, "these experts have no gate");
  KTFT_CHECK(source.rows == rows && source.cols == cols, "its shape is [", source.rows, ", ", source.cols,
             "], the model's config says [", rows, ", ", cols, "]");
  std::vector<int> units(pool.nodes(), 0);
  for (int n = 0; n < nodes(); n++) units[n] = ceil_div(matrix(n, expert, projection).rows, pack_rows(format_));
  const bool keep = keeps(source, format_);
  FirstBad bad;
  pool.run(units, [&](int node, int unit, int) {
    bad.note(pack(source, row_begin(node, projection), col_begin(node, projection), matrix(node, expert, projection),
                  unit, keep),
             cols);
  });
  bad.refuse(cols);
  loaded_[size_t(expert) * kProjections + int(projection)] = true;
  return keep;
}

void PackedExperts::load_bias(int expert, Projection projection, const float* values) {
  for (int i = 0; i < shape_.rows(projection); i++)
    KTFT_CHECK(std::isfinite(values[i]), "it holds NaN or Inf, for instance at [", i, "]");
  for (int n = 0; n < nodes(); n++)
    if (const PackedMatrix m = matrix(n, expert, projection); m.bias)
      std::copy_n(values + row_begin(n, projection), m.rows, m.bias);
  loaded_biases_[size_t(expert) * kProjections + int(projection)] = true;
}

void PackedExperts::bias(int expert, Projection projection, float* out) const {
  for (int n = 0; n < nodes(); n++)
    if (const PackedMatrix m = matrix(n, expert, projection); m.bias)
      std::copy_n(m.bias, m.rows, out + row_begin(n, projection));
}

}  // namespace ktft
