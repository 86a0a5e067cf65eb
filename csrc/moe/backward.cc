#include "moe/backward.h"

#include <algorithm>

namespace ktft {
namespace {

constexpr int kCols = kMaxOutputs;  // row stride of blocks
constexpr Projection kGateUp[2] = {Projection::kGate, Projection::kUp};
constexpr Projection kDown = Projection::kDown;

struct Pointers {
  const bf16 *x, *dy;     // [rows, hidden]; x is null when nothing needs it
  const bf16* dy_scaled;  // dy times down's row scales; dy itself when the format has none
  Activations act;
  std::vector<bf16*> grad[2];            // d gate, d up per node, [rows, width]
  std::vector<bf16*> grad_scaled[2];     // the same times gate's and up's row scales
  std::vector<float*> weight_grads;      // per node [blocks, rows]
  float* low_rank_dy;                    // [rows, r]: B_down^T dy
  std::vector<float*> low_rank_grad[2];  // per node [rows, r]: B^T d gate, B^T d up
  std::vector<float*> partial;           // per node [tokens, hidden]: d hidden
};

// y += scaling * low_rank . block, where the product's input went through dropout: the mask applies to the result.
void add_masked_low_rank(const Call& call, Projection p, const LoraPair& pair, const float* low_rank,
                         const float* block, int row, int rows, int cols, int first, float* spare, float* y) {
  if (!call.lora->drops()) return add_low_rank(call.vec(), pair, low_rank, block, rows, cols, kCols, y);
  std::fill(spare, spare + size_t(rows) * kCols, 0.f);
  add_low_rank(call.vec(), pair, low_rank, block, rows, cols, kCols, spare);
  for (int r = 0; r < rows; r++) {
    float* const at = spare + size_t(r) * kCols;
    call.vec().dropout(cols, at, call.lora->key(p, call.routes.row_route[row + r]), uint32_t(first),
                       call.lora->dropout);
    call.vec().add_scaled(cols, 1.f, at, y + size_t(r) * kCols);
  }
}

// sums [r, kCols] += low_rank^T . block over `rows` rows.
void add_outer(const VectorKernels& vec, int rank, int rows, int cols, const float* low_rank, const float* block,
               float* sums) {
  vec.gemm_nn(rank, cols, rows, low_rank, 1, rank, block, kCols, sums, kCols, 1.f);
}

// Writes scaling * sums [r, cols] into an A gradient (row-major, columns from col) or, transposed, into a B gradient.
void store_a(const LoraPair& pair, int expert, int col, int cols, const float* sums) {
  for (int j = 0; j < pair.rank(); j++)
    for (int c = 0; c < cols; c++)
      pair.grad_a[(size_t(expert) * pair.rank() + j) * pair.a.cols + col + c] = pair.scaling * sums[j * kCols + c];
}
void store_b(const LoraPair& pair, int expert, int row, int cols, const float* sums) {
  for (int c = 0; c < cols; c++)
    for (int j = 0; j < pair.rank(); j++)
      pair.grad_b[(size_t(expert) * pair.b.rows + row + c) * pair.rank() + j] = pair.scaling * sums[j * kCols + c];
}

float* zeroed(Scratch& scratch, int rank) {
  float* const p = scratch.take<float>(size_t(rank) * kCols);
  std::fill(p, p + size_t(rank) * kCols, 0.f);
  return p;
}

// One block of the intermediate dimension for all rows of an expert: dh, d gate, d up, <dh, h>, and the LoRA gradients
// that live on these columns (B of gate and up, A of down).
void intermediate_block(const Call& call, const Pointers& at, int node, int expert, int block, Scratch& scratch) {
  const VectorKernels& vec = call.vec();
  const PackedExperts& w = call.weights;
  const int hidden = w.shape().hidden, width = w.width(node), col = block * call.block;
  const int cols = std::min(call.block, width - col), first = w.begin(node) + col;
  const size_t count = size_t(kTokenChunk) * kCols;
  char* const gemm = scratch.take<char>(kGemmScratch);
  float *const dh = scratch.take<float>(count), *const h = scratch.take<float>(count);
  float* const grad[2] = {scratch.take<float>(count), scratch.take<float>(count)};
  float* const spare = scratch.take<float>(count);
  const LoraPair* const down = call.pair(kDown);
  float *a_down = nullptr, *sum_down = nullptr, *sums[2] = {nullptr, nullptr};
  if (down) {
    a_down = scratch.take<float>(size_t(down->rank()) * kCols);
    load_block(vec, down->a, expert, 0, down->rank(), first, cols, a_down, kCols);
    sum_down = zeroed(scratch, down->rank());
  }
  for (int p = 0; p < 2; p++)
    if (const LoraPair* pair = call.pair(kGateUp[p])) sums[p] = zeroed(scratch, pair->rank());

  const float* const scale[2] = {w.matrix(node, expert, Projection::kGate).row_scale,
                                 w.matrix(node, expert, Projection::kUp).row_scale};
  const int end = call.routes.offset[expert + 1];
  for (int row = call.routes.offset[expert]; row < end; row += kTokenChunk) {
    const int rows = std::min(kTokenChunk, end - row);
    run_gemm(call, Pass::kBackward, w.matrix(node, expert, kDown), col, cols, at.dy_scaled + size_t(row) * hidden,
             hidden, rows, dh, false, gemm);
    if (down)
      add_masked_low_rank(call, kDown, *down, at.low_rank_dy + size_t(row) * down->rank(), a_down, row, rows, cols,
                          first, spare, dh);
    for (int r = 0; r < rows; r++) {
      const size_t from = size_t(row + r) * width + col, to = size_t(r) * kCols;
      at.weight_grads[node][size_t(block) * call.routes.rows + row + r] =
          vec.silu_mul_backward(cols, call.row_weight(row + r), dh + to, at.act.nodes[node].gate + from,
                                at.act.nodes[node].up + from, grad[0] + to, grad[1] + to, h + to);
      for (int p = 0; p < 2; p++) {
        vec.narrow(cols, grad[p] + to, at.grad[p][node] + from);
        if (scale[p]) vec.narrow_scaled(cols, grad[p] + to, scale[p] + col, at.grad_scaled[p][node] + from);
      }
      if (!down) continue;
      if (call.lora->drops())
        vec.dropout(cols, h + to, call.lora->key(kDown, call.routes.row_route[row + r]), uint32_t(first),
                    call.lora->dropout);
      const float weight = call.row_weight(row + r);
      for (int c = 0; c < cols; c++) h[to + c] *= weight;
    }
    for (int p = 0; p < 2; p++)
      if (const LoraPair* pair = call.pair(kGateUp[p]))
        add_outer(vec, pair->rank(), rows, cols, at.act.low_rank[p] + size_t(row) * pair->rank(), grad[p], sums[p]);
    if (down) add_outer(vec, down->rank(), rows, cols, at.low_rank_dy + size_t(row) * down->rank(), h, sum_down);
  }
  for (int p = 0; p < 2; p++)
    if (sums[p]) store_b(*call.pair(kGateUp[p]), expert, first, cols, sums[p]);
  if (down) store_a(*down, expert, first, cols, sum_down);
}

// One block of the hidden dimension of d hidden: a group's experts in turn, as in forward.
void hidden_block(const Call& call, const Pointers& at, int node, int block, int group, float* partial,
                  Scratch& scratch) {
  const VectorKernels& vec = call.vec();
  const PackedExperts& w = call.weights;
  const int hidden = w.shape().hidden, width = w.width(node), col = block * call.block;
  const int cols = std::min(call.block, hidden - col), active = int(call.routes.active.size());
  char* const gemm = scratch.take<char>(kGemmScratch);
  float* const y = scratch.take<float>(size_t(kTokenChunk) * kCols);
  float* const spare = scratch.take<float>(size_t(kTokenChunk) * kCols);
  float* a[2] = {nullptr, nullptr};
  for (int p = 0; p < 2; p++)
    if (const LoraPair* pair = call.pair(kGateUp[p])) a[p] = scratch.take<float>(size_t(pair->rank()) * kCols);
  for (int t = 0; t < call.routes.tokens; t++) std::memset(partial + size_t(t) * hidden + col, 0, size_t(cols) * 4);
  for (int i = split(active, call.groups, group); i < split(active, call.groups, group + 1); i++) {
    const int expert = call.routes.active[i];
    for (int p = 0; p < 2; p++)
      if (const LoraPair* pair = call.pair(kGateUp[p]))
        load_block(vec, pair->a, expert, 0, pair->rank(), col, cols, a[p], kCols);
    const int end = call.routes.offset[expert + 1];
    for (int row = call.routes.offset[expert]; row < end; row += kTokenChunk) {
      const int rows = std::min(kTokenChunk, end - row);
      for (int p = 0; p < 2; p++) {
        run_gemm(call, Pass::kBackward, w.matrix(node, expert, kGateUp[p]), col, cols,
                 at.grad_scaled[p][node] + size_t(row) * width, width, rows, y, p == 1, gemm);
        // LoRA comes after both products: the first one clears y
        if (p == 0) continue;
        for (int q = 0; q < 2; q++)
          if (const LoraPair* pair = call.pair(kGateUp[q]))
            add_masked_low_rank(call, kGateUp[q], *pair, at.low_rank_grad[q][node] + size_t(row) * pair->rank(), a[q],
                                row, rows, cols, col, spare, y);
      }
      for (int r = 0; r < rows; r++)
        vec.add_scaled(cols, 1.f, y + size_t(r) * kCols, partial + size_t(call.routes.token(row + r)) * hidden + col);
    }
  }
}

// sum over nodes of rows [row, row + rows) of a low-rank product
void sum_nodes(const std::vector<const float*>& parts, int rank, int row, int rows, float* out) {
  const size_t begin = size_t(row) * rank, count = size_t(rows) * rank;
  std::memcpy(out, parts[0] + begin, count * 4);
  for (size_t n = 1; n < parts.size(); n++)
    for (size_t i = 0; i < count; i++) out[i] += parts[n][begin + i];
}

// The LoRA gradients that live on one block of the hidden dimension: A of gate and up, B of down.
void lora_hidden_block(const Call& call, const Pointers& at, int expert, int block, Scratch& scratch) {
  const VectorKernels& vec = call.vec();
  const int hidden = call.weights.shape().hidden, col = block * call.block;
  const int cols = std::min(call.block, hidden - col);
  float* const rows_f32 = scratch.take<float>(size_t(Routes::kChunkRows) * kCols);
  float* const low = scratch.take<float>(size_t(Routes::kChunkRows) * call.lora->max_rank());
  for (int p = 0; p < kProjections; p++) {
    const Projection projection = Projection(p);
    const LoraPair* const pair = call.pair(projection);
    if (!pair) continue;
    const bool down = projection == kDown;
    std::vector<const float*> parts;
    for (int n = 0; n < call.weights.nodes(); n++)
      parts.push_back(down ? at.act.nodes[n].low_rank_down : at.low_rank_grad[p][n]);
    float* const sums = zeroed(scratch, pair->rank());
    const int end = call.routes.offset[expert + 1];
    for (int row = call.routes.offset[expert]; row < end; row += Routes::kChunkRows) {
      const int rows = std::min(Routes::kChunkRows, end - row);
      sum_nodes(parts, pair->rank(), row, rows, low);
      load_rows(vec, call.routes, *call.lora, down ? nullptr : &projection,
                (down ? at.dy : at.x) + size_t(row) * hidden + col, hidden, row, rows, col, cols, 0, rows_f32, kCols);
      for (int r = 0; down && r < rows; r++)
        for (int j = 0; j < pair->rank(); j++) low[size_t(r) * pair->rank() + j] *= call.row_weight(row + r);
      add_outer(vec, pair->rank(), rows, cols, low, rows_f32, sums);
    }
    if (down)
      store_b(*pair, expert, col, cols, sums);
    else
      store_a(*pair, expert, col, cols, sums);
  }
}

// dy [rows, hidden] times the row scales of each row's expert's down projection.
const bf16* scale_rows(const Call& call, const bf16* dy) {
  const int hidden = call.weights.shape().hidden;
  bf16* const out = call.runtime.workspace.dy_scaled.get<bf16>(size_t(call.routes.rows + kTokenPad) * hidden);
  call.runtime.pool.run(int(call.routes.chunks.size()), [&](int task, int thread) {
    const RowChunk& chunk = call.routes.chunks[task];
    Scratch& scratch = call.runtime.scratch[thread];
    scratch.reset();
    float* const wide = scratch.take<float>(size_t(hidden));
    const float* const scale = call.weights.matrix(0, chunk.expert, kDown).row_scale;
    for (int row = chunk.begin; row < chunk.end; row++) {
      call.vec().widen(hidden, dy + size_t(row) * hidden, wide);
      call.vec().narrow_scaled(hidden, wide, scale, out + size_t(row) * hidden);
    }
  });
  return out;
}

Pointers place(const Call& call, Saved& saved, const BackwardArgs& args) {
  const PackedExperts& w = call.weights;
  Runtime& rt = call.runtime;
  Workspace& ws = rt.workspace;
  const size_t rows = size_t(call.routes.rows);
  Pointers at{};
  const bool needs_x = !saved.retained || call.pair(Projection::kGate) || call.pair(Projection::kUp);
  if (needs_x) at.x = gather(call, args.hidden, args.dtype, false, ws.x);
  at.dy = gather(call, args.grad_output, args.dtype, false, ws.dy);
  at.dy_scaled = info(w.format()).row_scaled ? scale_rows(call, at.dy) : at.dy;
  at.act = place_activations(call, nullptr, !saved.retained);
  if (saved.retained) {
    for (int p = 0; p < 2; p++) at.act.low_rank[p] = reinterpret_cast<float*>(saved.low_rank[p].data());
    for (int n = 0; n < w.nodes(); n++) {
      Saved::PerNode& s = saved.nodes[n];
      at.act.nodes[n].gate = reinterpret_cast<bf16*>(s.gate.data());
      at.act.nodes[n].up = reinterpret_cast<bf16*>(s.up.data());
      at.act.nodes[n].low_rank_down = reinterpret_cast<float*>(s.low_rank_down.data());
    }
  } else {
    gate_up(call, at.x, at.act);
  }
  if (const LoraPair* pair = call.pair(kDown)) at.low_rank_dy = ws.low_rank[int(kDown)].get<float>(rows * pair->rank());
  for (int n = 0; n < w.nodes(); n++) {
    NodeWorkspace& node = ws.nodes[n];
    const int id = rt.node_ids[n];
    for (int p = 0; p < 2; p++) {
      const size_t count = (rows + kTokenPad) * w.width(n);
      at.grad[p].push_back(node.grad[p].get<bf16>(count, id));
      at.grad_scaled[p].push_back(info(w.format()).row_scaled ? node.grad_scaled[p].get<bf16>(count, id)
                                                              : at.grad[p][n]);
    }
    at.weight_grads.push_back(node.weight_grads.get<float>(rows * ceil_div(w.width(n), call.block), id));
    at.partial.push_back(node.partial.get<float>(size_t(call.groups) * call.routes.tokens * w.shape().hidden, id));
    for (int p = 0; p < 2; p++) {
      const LoraPair* pair = call.pair(kGateUp[p]);
      at.low_rank_grad[p].push_back(pair ? node.low_rank[p].get<float>(rows * pair->rank(), id) : nullptr);
    }
  }
  return at;
}

// grad_weights[token, slot] = <dh, h>, summed over blocks and nodes in a fixed order.
void reduce_weight_grads(const Call& call, const Pointers& at, float* out) {
  for (int row = 0; row < call.routes.rows; row++) {
    float sum = 0;
    for (int n = 0; n < call.weights.nodes(); n++)
      for (int b = 0; b < ceil_div(call.weights.width(n), call.block); b++)
        sum += at.weight_grads[n][size_t(b) * call.routes.rows + row];
    out[call.routes.row_route[row]] = sum;
  }
}

}  // namespace

void backward(const Call& call, Saved& saved, const BackwardArgs& args) {
  const PackedExperts& w = call.weights;
  const Routes& routes = call.routes;
  Runtime& rt = call.runtime;
  const int hidden = w.shape().hidden, chunks = int(routes.chunks.size()), active = int(routes.active.size());
  reserve_scratch(call);
  const Pointers at = place(call, saved, args);
  std::vector<int> counts(rt.pool.nodes(), 0);
  const auto each_node = [&](const std::function<int(int)>& count, const Pool::Task& fn) {
    for (int n = 0; n < w.nodes(); n++) counts[n] = count(n);
    rt.pool.run(counts, [&](int node, int task, int thread) {
      rt.scratch[thread].reset();
      fn(node, task, thread);
    });
  };

  if (const LoraPair* pair = call.pair(kDown))
    rt.pool.run(chunks, [&](int task, int thread) {
      rt.scratch[thread].reset();
      low_rank(call.vec(), routes, *call.lora, {&pair->b, true, nullptr, at.dy, hidden, 0, at.low_rank_dy},
               routes.chunks[task], rt.scratch[thread]);
    });
  each_node([&](int n) { return active * ceil_div(w.width(n), call.block); },
            [&](int node, int task, int thread) {
              const int blocks = ceil_div(w.width(node), call.block);
              intermediate_block(call, at, node, routes.active[task / blocks], task % blocks, rt.scratch[thread]);
            });
  reduce_weight_grads(call, at, args.grad_weights);
  for (int p = 0; p < 2; p++)
    if (const LoraPair* pair = call.pair(kGateUp[p]))
      each_node([&](int) { return chunks; },
                [&](int node, int task, int thread) {
                  low_rank(call.vec(), routes, *call.lora,
                           {&pair->b, true, nullptr, at.grad[p][node], w.width(node), w.begin(node),
                            at.low_rank_grad[p][node]},
                           routes.chunks[task], rt.scratch[thread]);
                });
  each_node([&](int) { return ceil_div(hidden, call.block) * call.groups; },
            [&](int node, int task, int thread) {
              const int group = task % call.groups;
              hidden_block(call, at, node, task / call.groups, group,
                           at.partial[node] + size_t(group) * routes.tokens * hidden, rt.scratch[thread]);
            });
  if (call.lora)
    rt.pool.run(active * ceil_div(hidden, call.block), [&](int task, int thread) {
      const int blocks = ceil_div(hidden, call.block);
      rt.scratch[thread].reset();
      lora_hidden_block(call, at, routes.active[task / blocks], task % blocks, rt.scratch[thread]);
    });
  combine(call, args.grad_hidden, args.dtype);
}

}  // namespace ktft
