#include "moe/lora_grad.h"

#include <algorithm>

namespace ktft {
namespace {

constexpr Projection kDown = Projection::kDown;

// One gradient of one projection: low^T m, where m [packed rows, cols] lies on each node that has a slice of it.
//   grad_a [r, in]:  low = B^T dy (gate, up: d gate, d up), m = the projection's input
//   grad_b [out, r]: low = A x, m = the gradient of the projection's output
struct Product {
  Projection projection;
  bool is_b;
  std::vector<const float*> low;  // the nodes' parts
  bool sliced;                    // by nodes, or whole on node 0
  std::vector<bf16*> m;
  size_t transposed = 0;  // where in workspace.transposed, elements

  int nodes() const { return int(m.size()); }
};

std::vector<Product> products(const Call& call, const Gradients& at, bf16* x) {
  std::vector<Product> all;
  const int nodes = call.weights.nodes();
  for (int i = 0; i < kProjections; i++) {
    const Projection p = Projection(i);
    if (!call.pair(p)) continue;
    Product a{p, false, {}, p == kDown, {}, 0}, b{p, true, {}, p != kDown, {}, 0};
    if (p == kDown) {
      a.low = {at.low_rank_dy.rows};
      b.m = {at.dy};
    } else {
      a.m = {x};
      b.low = {at.low_rank[i]};
    }
    for (int n = 0; n < nodes; n++) {
      if (p == kDown) {
        a.m.push_back(at.nodes[n].h);
        b.low.push_back(at.nodes[n].low_rank_down);
      } else {
        a.low.push_back(at.nodes[n].low_rank[i].rows);
        b.m.push_back(at.nodes[n].grad[i]);
      }
    }
    all.push_back(std::move(a));
    all.push_back(std::move(b));
  }
  return all;
}

// Row j of the product, high and low parts together, at column c.
float value(const float* c, int j, int col, int places) {
  const int strip = j / kRankBlock * 2;
  const int64_t at = j % kRankBlock * 32 + col % 32;
  return c[result_piece(col / 32, strip, places) + at] + c[result_piece(col / 32, strip + 1, places) + at];
}

// One block of columns of one expert's gradient.
void gradient_block(const Call& call, const Product& product, const bf16* transposed, int node, const RowChunk& rows,
                    int col, int cols, int width, Scratch& scratch) {
  const LoraPair& pair = *call.pair(product.projection);
  const int rank = pair.rank(), places = split_rank(rank);
  const bool down = product.projection == kDown;
  bf16* m = product.m[node] + size_t(rows.packed) * width;
  const int first = product.sliced ? call.weights.begin(node) : 0;
  if (!product.is_b && call.lora->drops()) {
    const int strips = pad_rows(rows.rows) / kTileRows;
    bf16* const kept = scratch.take<bf16>(size_t(strips) * kTileRows * cols);
    for (int s = 0; s < strips; s++)
      std::memcpy(kept + size_t(s) * kTileRows * cols, m + size_t(s) * kTileRows * width + size_t(col) * kTileRows,
                  size_t(kTileRows) * cols * sizeof(bf16));
    drop_rows(call, product.projection, rows, kept, cols, first + col, false);
    m = kept;
    width = cols;
  }
  const PackedMatrix matrix = activation_matrix(m, pad_rows(rows.rows), width);
  float* const c = scratch.take<float>(size_t(places) * cols);
  run_gemm(call, Format::kBf16, Pass::kBackward,
           {{{&matrix, width == cols ? 0 : col, transposed, nullptr, 0, nullptr, c}},
            1,
            cols,
            places,
            scratch.take<char>(kGemmScratch)});
  if (!product.is_b) {
    for (int j = 0; j < rank; j++) {
      float* const out = pair.grad_a + (size_t(rows.expert) * rank + j) * pair.a.cols + first + col;
      for (int i = 0; i < cols; i++) out[i] = value(c, j, i, places) * call.lora->keep_scale();
    }
    return;
  }
  const float* const scale = call.weights.matrix(down ? 0 : node, rows.expert, product.projection).row_scale;
  float* const out = pair.grad_b + (size_t(rows.expert) * pair.b.rows + first + col) * rank;
  for (int i = 0; i < cols; i++) {
    const float factor = pair.scaling / (scale ? scale[col + i] : 1.f);
    for (int j = 0; j < rank; j++) out[size_t(i) * rank + j] = value(c, j, i, places) * factor;
  }
}

}  // namespace

void lora_gradients(const Call& call, const Gradients& at, const TokenRows& hidden) {
  Runtime& rt = call.runtime;
  const Routes& routes = call.routes;
  const bool needs_x = call.pair(Projection::kGate) || call.pair(Projection::kUp);
  bf16* const x = needs_x ? gather(call, hidden, {Pass::kBackward, false, false, {}}, rt.workspace.x) : nullptr;
  std::vector<Product> all = products(call, at, x);
  size_t total = 0;
  for (Product& product : all) {
    product.transposed = total;
    total += size_t(split_rank(call.pair(product.projection)->rank())) * routes.packed_rows;
  }
  bf16* const transposed = rt.workspace.transposed.get<bf16>(total);
  const auto operand = [&](const Product& product, const RowChunk& rows) {
    return transposed + product.transposed + size_t(split_rank(call.pair(product.projection)->rank())) * rows.packed;
  };
  const Phase phase(rt.phases, "lora gradients");
  const int experts = int(routes.experts.size()), count = int(all.size());
  rt.pool.run(experts * count, [&](int task, int thread) {
    const Product& product = all[task % count];
    const RowChunk& rows = routes.experts[task / count];
    rt.scratch[thread].reset();
    transpose_low_rank(call, product.low, call.pair(product.projection)->rank(), rows, product.projection == kDown,
                       operand(product, rows), rt.scratch[thread]);
  });
  struct Job {
    const Product* product;
    int node, col, cols, width;
  };
  std::vector<std::vector<Job>> jobs(rt.pool.nodes());
  std::vector<int> counts(rt.pool.nodes(), 0);
  for (const Product& product : all)
    for (int n = 0; n < product.nodes(); n++) {
      const int width = product.sliced ? call.weights.width(n) : call.weights.shape().hidden;
      for (int col = 0; col < width; col += call.block)
        jobs[n].push_back({&product, n, col, std::min(call.block, width - col), width});
    }
  for (size_t n = 0; n < jobs.size(); n++) counts[n] = experts * int(jobs[n].size());
  rt.pool.run(counts, [&](int node, int task, int thread) {
    const Job& job = jobs[node][task % jobs[node].size()];
    const RowChunk& rows = routes.experts[task / jobs[node].size()];
    rt.scratch[thread].reset();
    gradient_block(call, *job.product, operand(*job.product, rows), job.node, rows, job.col, job.cols, job.width,
                   rt.scratch[thread]);
  });
}

}  // namespace ktft
