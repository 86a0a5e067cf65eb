#include "moe/lora_grad.h"

#include <algorithm>

namespace ktft {
namespace {

constexpr Projection kDown = Projection::kDown;

// Gradients of the form low^T m with the same m [packed rows, cols]. Each node has a slice of m.
//   grad_a [r, in]:  low = B^T dy (gate, up: d gate, d up), m = the projections' input
//   grad_b [out, r]: low = A x, m = the gradient of the projection's output
struct Product {
  std::vector<Projection> projections;  // several if they share m
  bool is_b;
  bool sliced;           // whether nodes have slices of m; otherwise node 0 has all of it
  std::vector<bf16*> m;  // of each node; null for the layer's input, which is gathered block by block

  bool of_tokens() const { return !m[0]; }
};

int places(const Call& call, const Product& product) {
  int sum = 0;
  for (Projection p : product.projections) sum += split_rank(call.pair(p)->rank());
  return sum;
}

std::vector<Product> products(const Call& call, const Gradients& at) {
  std::vector<Product> all;
  std::vector<Projection> inputs;  // those that multiply the layer's input
  for (const Projection p : kGateUp)
    if (call.pair(p)) {
      inputs.push_back(p);
      Product b{.projections = {p}, .is_b = true, .sliced = true, .m = {}};
      for (const Gradients::PerNode& node : at.nodes) b.m.push_back(node.grad[int(p)]);
      all.push_back(b);
    }
  if (inputs.size()) {
    Product a{.projections = inputs, .is_b = false, .sliced = false, .m = {nullptr}};
    // With dropout, gate's input is not up's
    if (inputs.size() == 2 && (call.lora->drops() || places(call, a) > kMaxTokens)) {
      for (Projection p : inputs) {
        a.projections = {p};
        all.push_back(a);
      }
    } else {
      all.push_back(a);
    }
  }
  if (call.pair(kDown)) {
    Product a{.projections = {kDown}, .is_b = false, .sliced = true, .m = {}};
    for (const Activations::PerNode& node : at.act.nodes) a.m.push_back(node.h);
    all.push_back(a);
    all.push_back({.projections = {kDown}, .is_b = true, .sliced = false, .m = {at.dy}});
  }
  return all;
}

std::vector<const float*> low_parts(const Gradients& at, Projection p, bool is_b) {
  if (p == kDown && !is_b) return {at.low_rank_dy.rows};
  if (p != kDown && is_b) return {at.act.low_rank[int(p)].rows};
  std::vector<const float*> parts;
  for (size_t n = 0; n < at.nodes.size(); n++)
    parts.push_back(p == kDown ? at.act.nodes[n].down.rows : at.nodes[n].low_rank[int(p)].rows);
  return parts;
}

// Copies these columns of an activation, which the caller is going to change.
void copy_block(const bf16* m, int width, const RowChunk& rows, int col, int cols, bf16* out) {
  for (int t = 0; t < pad_rows(rows.rows); t += kTileRows)
    std::memcpy(out + activation_elements(t, cols), m + activation_elements(t, width) + size_t(col) * kTileRows,
                size_t(kTileRows) * cols * sizeof(bf16));
}

// Adds the high and low parts in columns [col, col + 32) of row j. The result's parts begin at row `first`.
void sum_parts(const float* c, int first, int j, int col, int rows, float* out) {
  const int strip = first / kTileRows + j / kRankBlock * 2;
  const float* const high = c + result_piece(col / 32, strip, rows) + j % kRankBlock * 32;
  const float* const low = c + result_piece(col / 32, strip + 1, rows) + j % kRankBlock * 32;
  for (int i = 0; i < 32; i++) out[i] = high[i] + low[i];
}

struct Job {
  const Product* product;
  int node, col, cols, width;
};

// One block of columns of one expert's gradients.
void gradient_block(const Call& call, const TokenRows& hidden, const Job& job, const bf16* transposed,
                    const RowChunk& rows, Scratch& scratch) {
  const Product& product = *job.product;
  const int count = places(call, product), cols = job.cols;
  const int first = (product.sliced ? call.weights.begin(job.node) : 0) + job.col;
  const bool drops = !product.is_b && call.lora->drops();
  bf16* m = product.of_tokens() ? nullptr : product.m[job.node] + activation_elements(rows.packed, job.width);
  int col = job.col, width = job.width;
  if (product.of_tokens() || drops) {
    bf16* const block = scratch.take<bf16>(activation_elements(pad_rows(rows.rows), cols));
    if (product.of_tokens())
      gather_chunk(call, hidden, {.pass = Pass::kBackward, .col = col, .cols = cols}, rows, block, scratch);
    else
      copy_block(m, width, rows, col, cols, block);
    m = block;
    if (drops) drop_rows(call, product.projections[0], rows, m, cols, first, false);
    col = 0;
    width = cols;
  }
  const PackedMatrix matrix = bf16_matrix(m, pad_rows(rows.rows), width, strip_elements(width));
  float* const c = scratch.take<float>(size_t(count) * cols);
  run_gemm(call, Format::kBf16, Pass::kBackward,
           {.terms = {{.w = &matrix, .out_begin = col, .x = transposed, .c = c}},
            .out_count = cols,
            .tokens = count,
            .scratch = scratch.take<char>(kGemmScratch)});
  int place = 0;
  for (Projection p : product.projections) {
    const LoraPair& pair = *call.pair(p);
    const int rank = pair.rank();
    const float* const scale = call.weights.matrix(job.node, rows.expert, p).row_scale;
    for (int begin = 0; begin < cols; begin += 32)
      for (int j = 0; j < rank; j++) {
        float sums[32];
        sum_parts(c, place, j, begin, count, sums);
        if (product.is_b) {
          float* const out = pair.grad_b + (size_t(rows.expert) * pair.b.rows + first + begin) * rank + j;
          const float* const scales = scale ? scale + job.col + begin : nullptr;
          for (int i = 0; i < 32; i++) out[size_t(i) * rank] = sums[i] * (pair.scaling / (scales ? scales[i] : 1.f));
        } else {
          float* const out = pair.grad_a + (size_t(rows.expert) * rank + j) * pair.a.cols + first + begin;
          for (int i = 0; i < 32; i++) out[i] = sums[i] * call.lora->keep_scale();
        }
      }
    place += split_rank(rank);
  }
}

std::vector<Job> jobs_of(const Call& call, const std::vector<Product>& all, int node) {
  std::vector<Job> jobs;
  for (const Product& product : all) {
    if (node >= int(product.m.size())) continue;
    const int width = product.sliced ? call.weights.width(node) : call.weights.shape().hidden;
    for (int col = 0; col < width; col += call.block)
      jobs.push_back(
          {.product = &product, .node = node, .col = col, .cols = std::min(call.block, width - col), .width = width});
  }
  return jobs;
}

// All lows of a product, transposed.
void transpose_lows(const Call& call, const Gradients& at, const Product& product, const RowChunk& rows, bf16* out,
                    Scratch& scratch) {
  int place = 0;
  for (Projection p : product.projections) {
    scratch.reset();
    transpose_low_rank(call, low_parts(at, p, product.is_b), call.pair(p)->rank(), rows, p == kDown,
                       out + activation_elements(place, pad_rows(rows.rows)), scratch);
    place += split_rank(call.pair(p)->rank());
  }
}

}  // namespace

void zero_idle_gradients(const Call& call) {
  std::vector<bool> saw(call.weights.shape().experts, false);
  for (int expert : call.routes.active) saw[expert] = true;
  for (int e = 0; call.lora->elsewhere && e < int(saw.size()); e++) saw[e] = saw[e] || call.lora->elsewhere[e];
  call.runtime.pool.run(call.weights.shape().experts, [&](int e, int) {
    for (const auto& pair : call.lora->pairs) {
      if (!pair || saw[e]) continue;
      const size_t a = size_t(pair->a.rows) * pair->a.cols, b = size_t(pair->b.rows) * pair->b.cols;
      std::memset(pair->grad_a + e * a, 0, a * sizeof(float));
      std::memset(pair->grad_b + e * b, 0, b * sizeof(float));
    }
  });
}

void expert_gradients(const Call& call, const Gradients& at, const TokenRows& hidden, const RowChunk& rows,
                      Scratch& memory, Scratch& scratch) {
  const std::vector<Product> all = products(call, at);
  std::vector<bf16*> transposed;
  for (const Product& product : all) {
    transposed.push_back(memory.take<bf16>(activation_elements(places(call, product), pad_rows(rows.rows))));
    transpose_lows(call, at, product, rows, transposed.back(), scratch);
  }
  for (const Job& job : jobs_of(call, all, 0)) {
    scratch.reset();
    gradient_block(call, hidden, job, transposed[job.product - all.data()], rows, scratch);
  }
}

void lora_gradients(const Call& call, const Gradients& at, const TokenRows& hidden) {
  Runtime& rt = call.runtime;
  const Routes& routes = call.routes;
  const Phase phase(rt.phases, "lora gradients");
  zero_idle_gradients(call);
  const std::vector<Product> all = products(call, at);
  const int experts = int(routes.experts.size()), count = int(all.size());
  std::vector<size_t> begin{0};  // of (expert, product)'s transposed lows
  for (const RowChunk& rows : routes.experts)
    for (const Product& product : all)
      begin.push_back(begin.back() + activation_elements(places(call, product), pad_rows(rows.rows)));
  bf16* const transposed = call.workspace().transposed.get<bf16>(call.sizes.transposed);
  rt.pool.run(experts * count, [&](int task, int thread) {
    transpose_lows(call, at, all[task % count], routes.experts[task / count], transposed + begin[task],
                   rt.scratch[thread]);
  });
  std::vector<std::vector<Job>> jobs;
  std::vector<int> counts(rt.pool.nodes(), 0);
  for (int n = 0; n < call.weights.nodes(); n++) {
    jobs.push_back(jobs_of(call, all, n));
    counts[n] = experts * int(jobs[n].size());
  }
  rt.pool.run(counts, [&](int node, int task, int thread) {
    const int e = task / int(jobs[node].size());
    const Job& job = jobs[node][task % jobs[node].size()];
    rt.scratch[thread].reset();
    gradient_block(call, hidden, job, transposed + begin[size_t(e) * count + (job.product - all.data())],
                   routes.experts[e], rt.scratch[thread]);
  });
}

}  // namespace ktft
