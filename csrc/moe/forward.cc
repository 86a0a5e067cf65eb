#include "moe/forward.h"

#include <algorithm>
#include <atomic>

namespace ktft {
namespace {

constexpr int kTokensPerTask = 16;
constexpr Projection kGateUp[2] = {Projection::kGate, Projection::kUp};

// Row `t` of tokens as bf16; returns whether it is finite.
bool narrow_token(const VectorKernels& vec, const void* tokens, Dtype dtype, int t, int hidden, bf16* out,
                  float* spare) {
  const size_t at = size_t(t) * hidden;
  if (dtype == Dtype::kBf16) {
    std::memcpy(out, static_cast<const bf16*>(tokens) + at, size_t(hidden) * 2);
  } else if (dtype == Dtype::kF32) {
    vec.narrow(hidden, static_cast<const float*>(tokens) + at, out);
  } else {
    for (int c = 0; c < hidden; c++) spare[c] = half_to_float(static_cast<const uint16_t*>(tokens)[at + c]);
    vec.narrow(hidden, spare, out);
  }
  int bad = 0;
  for (int c = 0; c < hidden; c++) bad |= (out[c].bits & 0x7f80) == 0x7f80;
  return !bad;
}

// Rows as the forward GEMM of this ISA takes them.
struct GemmRows {
  const bf16* data;
  bool packed;  // expert by expert, each with whole 32s of rows
  int cols;

  const bf16* at(const Routes& routes, int expert, int row) const {
    return data + size_t(packed ? routes.packed[expert] + row - routes.offset[expert] : row) * cols;
  }
};

GemmRows packed_buffer(const Call& call, const bf16* rows, int cols, Growing& out, int node_id) {
  if (!call.vec().pack_tokens) return {rows, false, cols};
  return {out.get<bf16>(size_t(call.routes.packed_rows) * cols, node_id), true, cols};
}

void pack_chunk(const Call& call, const bf16* rows, const RowChunk& chunk, const GemmRows& out) {
  call.vec().pack_tokens(chunk.end - chunk.begin, out.cols, rows + size_t(chunk.begin) * out.cols, out.cols,
                         const_cast<bf16*>(out.at(call.routes, chunk.expert, chunk.begin)));
}

// One block of columns of gate, up and h for all rows of an expert.
void gate_up_block(const Call& call, const GemmRows& x, const Activations& act, int node, int expert, int block,
                   Scratch& scratch) {
  const VectorKernels& vec = call.vec();
  const int hidden = call.weights.shape().hidden, width = call.weights.width(node);
  const int col = block * call.block, cols = std::min(call.block, width - col), first = call.weights.begin(node) + col;
  char* const gemm = scratch.take<char>(kGemmScratch);
  float* y[2] = {scratch.take<float>(size_t(kTokenChunk) * kMaxOutputs),
                 scratch.take<float>(size_t(kTokenChunk) * kMaxOutputs)};
  float* b[2] = {nullptr, nullptr};
  for (int p = 0; p < 2; p++)
    if (const LoraPair* pair = call.pair(kGateUp[p])) {
      b[p] = scratch.take<float>(size_t(pair->rank()) * kMaxOutputs);
      load_transposed(pair->b, expert, first, cols, 0, pair->rank(), b[p], kMaxOutputs);
    }
  const Activations::PerNode& out = act.nodes[node];
  const int end = call.routes.offset[expert + 1];
  for (int row = call.routes.offset[expert]; row < end; row += kTokenChunk) {
    const int rows = std::min(kTokenChunk, end - row);
    for (int p = 0; p < 2; p++) {
      run_gemm(call, Pass::kForward, call.weights.matrix(node, expert, kGateUp[p]), col, cols,
               x.at(call.routes, expert, row), hidden, rows, y[p], false, gemm);
      if (const LoraPair* pair = call.pair(kGateUp[p]))
        add_low_rank(vec, *pair, act.low_rank[p] + size_t(row) * pair->rank(), b[p], rows, cols, kMaxOutputs, y[p]);
    }
    for (int r = 0; r < rows; r++) {
      const size_t at = size_t(row + r) * width + col;
      vec.silu_mul(cols, y[0] + r * kMaxOutputs, y[1] + r * kMaxOutputs, out.h + at);
      if (out.gate) {
        vec.narrow(cols, y[0] + r * kMaxOutputs, out.gate + at);
        vec.narrow(cols, y[1] + r * kMaxOutputs, out.up + at);
      }
    }
  }
}

// One block of columns of the layer's output: a group's experts in turn, so that no two threads add to one place and
// the order of additions is fixed.
void down_block(const Call& call, const GemmRows& h, const Activations& act, int node, int block, int group,
                float* partial, Scratch& scratch) {
  const VectorKernels& vec = call.vec();
  const int hidden = call.weights.shape().hidden, width = call.weights.width(node);
  const int col = block * call.block, cols = std::min(call.block, hidden - col);
  const LoraPair* pair = call.pair(Projection::kDown);
  char* const gemm = scratch.take<char>(kGemmScratch);
  float* const y = scratch.take<float>(size_t(kTokenChunk) * kMaxOutputs);
  float* const b = pair ? scratch.take<float>(size_t(pair->rank()) * kMaxOutputs) : nullptr;
  for (int t = 0; t < call.routes.tokens; t++) std::memset(partial + size_t(t) * hidden + col, 0, size_t(cols) * 4);
  const int active = int(call.routes.active.size());
  for (int i = split(active, call.groups, group); i < split(active, call.groups, group + 1); i++) {
    const int expert = call.routes.active[i];
    if (pair) load_transposed(pair->b, expert, col, cols, 0, pair->rank(), b, kMaxOutputs);
    const int end = call.routes.offset[expert + 1];
    for (int row = call.routes.offset[expert]; row < end; row += kTokenChunk) {
      const int rows = std::min(kTokenChunk, end - row);
      run_gemm(call, Pass::kForward, call.weights.matrix(node, expert, Projection::kDown), col, cols,
               h.at(call.routes, expert, row), width, rows, y, false, gemm);
      if (pair)
        add_low_rank(vec, *pair, act.nodes[node].low_rank_down + size_t(row) * pair->rank(), b, rows, cols, kMaxOutputs,
                     y);
      for (int r = 0; r < rows; r++)
        vec.add_scaled(cols, call.row_weight(row + r), y + r * kMaxOutputs,
                       partial + size_t(call.routes.token(row + r)) * hidden + col);
    }
  }
}

}  // namespace

Saved::~Saved() {
  for (NodeBuffer& buffer : low_rank) runtime->buffers.give(std::move(buffer), -1);
  for (size_t n = 0; n < nodes.size(); n++)
    for (NodeBuffer* buffer : {&nodes[n].gate, &nodes[n].up, &nodes[n].low_rank_down})
      runtime->buffers.give(std::move(*buffer), runtime->node_ids[n]);
}

size_t Saved::bytes() const {
  size_t total = low_rank[0].size() + low_rank[1].size();
  for (const PerNode& node : nodes) total += node.gate.size() + node.up.size() + node.low_rank_down.size();
  return total;
}

void choose_blocks(Call& call) {
  constexpr int kManyRows = 32, kSmallBlock = 64, kTasks = 64, kMaxGroups = 8;
  const int active = std::max(1, int(call.routes.active.size()));
  const bool many = call.routes.rows >= active * kManyRows;
  call.block = many ? kMaxOutputs : kSmallBlock;
  const int wanted = kTasks / ceil_div(call.weights.shape().hidden, call.block);
  call.groups = many ? std::clamp(wanted, 1, std::min(kMaxGroups, active)) : 1;
}

void reserve_scratch(const Call& call) {
  const size_t rank = call.lora ? size_t(call.lora->max_rank()) : 0;
  const size_t blocks =
      kTokenChunk * kMaxOutputs * 5 + rank * kMaxOutputs * 7 + Routes::kChunkRows * (rank * 3 + kMaxOutputs) + 8192;
  const size_t bytes = kGemmScratch + (blocks + size_t(call.weights.shape().hidden)) * 4 + lora_scratch(call.lora);
  for (Scratch& scratch : call.runtime.scratch) scratch.reserve(bytes);
}

void run_gemm(const Call& call, Pass pass, const PackedMatrix& matrix, int out_begin, int out_count, const bf16* x,
              int64_t ldx, int rows, float* y, bool accumulate, char* scratch) {
  find_gemm(call.runtime.isa, matrix.format, pass)
      .run({&matrix, out_begin, out_count, x, ldx, rows, y, accumulate, scratch});
}

void add_low_rank(const VectorKernels& vec, const LoraPair& pair, const float* low_rank, const float* block, int rows,
                  int cols, int64_t ld, float* y) {
  vec.gemm_nn(rows, cols, pair.rank(), low_rank, pair.rank(), 1, block, ld, y, ld, pair.scaling);
}

const bf16* gather(const Call& call, const void* tokens, Dtype dtype, bool check, Growing& out) {
  const Routes& routes = call.routes;
  const int hidden = call.weights.shape().hidden, tasks = (routes.tokens + kTokensPerTask - 1) / kTokensPerTask;
  bf16* const rows = out.get<bf16>(size_t(routes.rows + kTokenPad) * hidden);
  std::atomic<int> bad{-1};
  call.runtime.pool.run(tasks, [&](int task, int thread) {
    Scratch& scratch = call.runtime.scratch[thread];
    scratch.reset();
    float* const spare = scratch.take<float>(size_t(hidden));
    const int end = std::min(routes.tokens, (task + 1) * kTokensPerTask);
    for (int t = task * kTokensPerTask; t < end; t++) {
      bf16* const first = rows + size_t(routes.route_row[t * routes.top_k]) * hidden;
      if (!narrow_token(call.vec(), tokens, dtype, t, hidden, first, spare) && check) bad = t;
      for (int j = 1; j < routes.top_k; j++)
        std::memcpy(rows + size_t(routes.route_row[t * routes.top_k + j]) * hidden, first, size_t(hidden) * 2);
    }
  });
  KTFT_CHECK(bad < 0, call.name, ": hidden states hold NaN or Inf (token ", bad.load(), " of ", routes.tokens,
             "). The layers before this one produced it: look for a too high learning rate, fp16 overflow (use bf16: "
             "true) or damaged weights");
  return rows;
}

Activations place_activations(const Call& call, Saved* saved, bool keep_gate_up) {
  const PackedExperts& w = call.weights;
  Workspace& ws = call.runtime.workspace;
  const size_t rows = size_t(call.routes.rows);
  Activations act{};
  if (saved) saved->nodes.resize(w.nodes());
  for (int p = 0; p < 2; p++)
    if (const LoraPair* pair = call.pair(kGateUp[p])) {
      const size_t count = rows * pair->rank();
      if (saved) saved->low_rank[p] = call.runtime.buffers.take(count * sizeof(float), -1);
      act.low_rank[p] = saved ? reinterpret_cast<float*>(saved->low_rank[p].data()) : ws.low_rank[p].get<float>(count);
    }
  for (int n = 0; n < w.nodes(); n++) {
    const int id = call.runtime.node_ids[n];
    const size_t count = rows * w.width(n);
    NodeWorkspace& node = ws.nodes[n];
    Activations::PerNode out{nullptr, nullptr, node.h.get<bf16>(count + size_t(kTokenPad) * w.width(n), id), nullptr};
    if (saved) {
      Saved::PerNode& s = saved->nodes[n];
      s.gate = call.runtime.buffers.take(count * sizeof(bf16), id);
      s.up = call.runtime.buffers.take(count * sizeof(bf16), id);
      out.gate = reinterpret_cast<bf16*>(s.gate.data());
      out.up = reinterpret_cast<bf16*>(s.up.data());
    } else if (keep_gate_up) {
      out.gate = node.gate.get<bf16>(count, id);
      out.up = node.up.get<bf16>(count, id);
    }
    if (const LoraPair* pair = call.pair(Projection::kDown)) {
      const size_t low = rows * pair->rank();
      if (saved) saved->nodes[n].low_rank_down = call.runtime.buffers.take(low * sizeof(float), id);
      out.low_rank_down = saved ? reinterpret_cast<float*>(saved->nodes[n].low_rank_down.data())
                                : node.low_rank[int(Projection::kDown)].get<float>(low, id);
    }
    act.nodes.push_back(out);
  }
  return act;
}

void gate_up(const Call& call, const bf16* x, const Activations& act) {
  const PackedExperts& w = call.weights;
  const Routes& routes = call.routes;
  Runtime& rt = call.runtime;
  const int chunks = int(routes.chunks.size()), hidden = w.shape().hidden;
  for (int p = 0; p < 2; p++)
    if (const LoraPair* pair = call.pair(kGateUp[p]))
      rt.pool.run(chunks, [&](int task, int thread) {
        rt.scratch[thread].reset();
        low_rank(call.vec(), routes, *call.lora, {&pair->a, false, &kGateUp[p], x, hidden, 0, act.low_rank[p]},
                 routes.chunks[task], rt.scratch[thread]);
      });
  const GemmRows in = packed_buffer(call, x, hidden, rt.workspace.x_packed, -1);
  if (in.packed) rt.pool.run(chunks, [&](int task, int) { pack_chunk(call, x, routes.chunks[task], in); });
  std::vector<int> counts(w.nodes());
  for (int n = 0; n < w.nodes(); n++) counts[n] = int(routes.active.size()) * ceil_div(w.width(n), call.block);
  counts.resize(rt.pool.nodes(), 0);
  rt.pool.run(counts, [&](int node, int task, int thread) {
    const int blocks = ceil_div(w.width(node), call.block);
    rt.scratch[thread].reset();
    gate_up_block(call, in, act, node, routes.active[task / blocks], task % blocks, rt.scratch[thread]);
  });
  const LoraPair* pair = call.pair(Projection::kDown);
  if (!pair) return;
  std::fill(counts.begin(), counts.begin() + w.nodes(), chunks);
  constexpr Projection kDown = Projection::kDown;
  rt.pool.run(counts, [&](int node, int task, int thread) {
    rt.scratch[thread].reset();
    const Activations::PerNode& at = act.nodes[node];
    low_rank(call.vec(), routes, *call.lora,
             {&pair->a, false, &kDown, at.h, w.width(node), w.begin(node), at.low_rank_down}, routes.chunks[task],
             rt.scratch[thread]);
  });
}

void combine(const Call& call, void* out, Dtype dtype) {
  const int hidden = call.weights.shape().hidden, tokens = call.routes.tokens, nodes = call.weights.nodes();
  std::vector<const float*> partial;
  for (int n = 0; n < nodes; n++)
    for (int g = 0; g < call.groups; g++)
      partial.push_back(call.runtime.workspace.nodes[n].partial.get<float>(0) + size_t(g) * tokens * hidden);
  call.runtime.pool.run((tokens + kTokensPerTask - 1) / kTokensPerTask, [&](int task, int thread) {
    Scratch& scratch = call.runtime.scratch[thread];
    scratch.reset();
    float* const sum = scratch.take<float>(size_t(hidden));
    for (int t = task * kTokensPerTask; t < std::min(tokens, (task + 1) * kTokensPerTask); t++) {
      const size_t at = size_t(t) * hidden;
      std::memcpy(sum, partial[0] + at, size_t(hidden) * 4);
      for (size_t n = 1; n < partial.size(); n++) call.vec().add_scaled(hidden, 1.f, partial[n] + at, sum);
      if (dtype == Dtype::kF32)
        std::memcpy(static_cast<float*>(out) + at, sum, size_t(hidden) * 4);
      else if (dtype == Dtype::kBf16)
        call.vec().narrow(hidden, sum, static_cast<bf16*>(out) + at);
      else
        for (int c = 0; c < hidden; c++) static_cast<uint16_t*>(out)[at + c] = float_to_half(sum[c]);
    }
  });
}

void forward(const Call& call, const void* hidden, Dtype dtype, void* out, Saved* saved, bool retain) {
  const PackedExperts& w = call.weights;
  Runtime& rt = call.runtime;
  reserve_scratch(call);
  const bf16* const x = gather(call, hidden, dtype, true, rt.workspace.x);
  const Activations act = place_activations(call, retain ? saved : nullptr, false);
  if (saved) saved->retained = retain;
  gate_up(call, x, act);
  std::vector<float*> partial(w.nodes());
  for (int n = 0; n < w.nodes(); n++)
    partial[n] = rt.workspace.nodes[n].partial.get<float>(size_t(call.groups) * call.routes.tokens * w.shape().hidden,
                                                          rt.node_ids[n]);
  std::vector<GemmRows> h;
  for (int n = 0; n < w.nodes(); n++)
    h.push_back(packed_buffer(call, act.nodes[n].h, w.width(n), rt.workspace.nodes[n].h_packed, rt.node_ids[n]));
  std::vector<int> counts(rt.pool.nodes(), 0);
  std::fill(counts.begin(), counts.begin() + w.nodes(), int(call.routes.chunks.size()));
  if (h[0].packed)
    rt.pool.run(counts, [&](int node, int task, int) {
      pack_chunk(call, act.nodes[node].h, call.routes.chunks[task], h[node]);
    });
  std::fill(counts.begin(), counts.begin() + w.nodes(), ceil_div(w.shape().hidden, call.block) * call.groups);
  rt.pool.run(counts, [&](int node, int task, int thread) {
    rt.scratch[thread].reset();
    const int group = task % call.groups;
    down_block(call, h[node], act, node, task / call.groups, group,
               partial[node] + size_t(group) * call.routes.tokens * w.shape().hidden, rt.scratch[thread]);
  });
  combine(call, out, dtype);
}

}  // namespace ktft
