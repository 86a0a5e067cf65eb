#include "moe/forward.h"

#include <algorithm>
#include <atomic>

#include "moe/by_expert.h"
#include "moe/w8a8.h"

namespace ktft {
namespace {

constexpr int kTokensPerTask = 16, kColsPerTask = 1024;  // of combine, when tokens alone are too few tasks
constexpr Projection kGateUp[2] = {Projection::kGate, Projection::kUp};
constexpr Projection kDown = Projection::kDown;

void product(const Call& call, const GemmArgs& args, const Int8Rows& x, const RowChunk& rows, Scratch& scratch) {
  count_weights(call, Pass::kForward, args);
  if (!call.int8) return run_gemm(call, call.weights.format(), Pass::kForward, args);
  int8_product(call, args, int8_rows_at(x, rows.packed, args.terms[0].w->cols), scratch);
}

// Rows without what dropout drops of them: themselves, or a copy.
const bf16* dropped(const Call& call, Projection p, const RowChunk& chunk, const bf16* rows, int cols, int first,
                    Scratch& scratch) {
  if (!call.lora->drops()) return rows;
  const size_t count = activation_elements(pad_rows(chunk.rows), cols);
  bf16* const kept = scratch.take<bf16>(count);
  std::memcpy(kept, rows, count * sizeof(bf16));
  drop_rows(call, p, chunk, kept, cols, first, call.vec().turned);
  return kept;
}

}  // namespace

const bf16* bf16_row(const Call& call, const TokenRows& tokens, int token, int col, int cols, bf16* out, float* spare) {
  const size_t at = size_t(token) * call.weights.shape().hidden + col;
  if (tokens.dtype == Dtype::kBf16) return static_cast<const bf16*>(tokens.data) + at;
  const float* wide = static_cast<const float*>(tokens.data) + at;
  if (tokens.dtype == Dtype::kF16) {
    for (int c = 0; c < cols; c++) spare[c] = half_to_float(static_cast<const uint16_t*>(tokens.data)[at + c]);
    wide = spare;
  }
  call.vec().narrow(cols, wide, out);
  return out;
}

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

void plan(Call& call) {
  constexpr int kPerThread = 4, kLeast = 64;
  constexpr size_t kExpertBytes = size_t(2) << 20;  // what an L2 holds
  const ExpertShape& shape = call.weights.shape();
  const Routes& routes = call.routes;
  const int calls = int(routes.calls.size()), wanted = kPerThread * call.runtime.pool.threads();
  size_t largest = 0;
  for (const RowChunk& expert : routes.experts)
    largest = std::max(largest, size_t(expert.rows) * (shape.hidden + shape.intermediate) * sizeof(bf16));
  call.by_expert =
      call.weights.nodes() == 1 && int(routes.experts.size()) == calls && calls >= wanted && largest <= kExpertBytes;
  call.block = kMaxOutputs;
  while (!call.by_expert && call.block > kLeast && calls * ceil_div(shape.intermediate, call.block) < wanted)
    call.block /= 2;
}

void reserve_scratch(const Call& call) {
  const size_t hidden = size_t(call.weights.shape().hidden);
  const size_t gemm = kGemmScratch + size_t(2) * kMaxTokens * kMaxOutputs * sizeof(float) + kMaxTokens * 8;
  const size_t gathering = hidden * (kTileRows * 2 * sizeof(bf16) + 2 * sizeof(float)) + lora_scratch(call) +
                           (call.int8 ? activation_elements(Routes::kChunkRows, int(hidden)) * sizeof(bf16) : 0);
  for (Scratch& scratch : call.runtime.scratch) scratch.reserve(std::max(gemm, gathering) + 4096);
  if (!call.by_expert) return;
  for (Scratch& memory : call.runtime.expert_memory) memory.reserve(expert_bytes(call));
}

void run_gemm(const Call& call, Format format, Pass pass, const GemmArgs& args) {
  find_gemm(call.runtime.isa, format, pass).run(args);
}

void count_weights(const Call& call, Pass pass, const GemmArgs& args) {
  const FormatInfo& format = info(call.weights.format());
  int64_t bytes = 0;
  for (int i = 0; i < args.count; i++) {
    const GemmTerm& term = args.terms[i];
    const int first = term.out_begin / format.tile_cols,
              end = ceil_div(term.out_begin + args.out_count, format.tile_cols);
    const int64_t tiles = pass == Pass::kForward ? int64_t(args.out_count / kTileRows) * term.w->col_tiles()
                                                 : int64_t(term.w->rows / kTileRows) * (end - first);
    bytes += tiles * format.tile_bytes;
  }
  call.runtime.weight_bytes.fetch_add(bytes, std::memory_order_relaxed);
}

void each_node(const Call& call, const char* name, const std::function<int(int)>& count,
               const std::function<void(int, int, Scratch&)>& fn) {
  Runtime& rt = call.runtime;
  const Phase phase(rt.phases, name);
  std::vector<int> counts(rt.pool.nodes(), 0);
  for (int n = 0; n < call.weights.nodes(); n++) counts[n] = count(n);
  rt.pool.run(counts, [&](int node, int task, int thread) {
    rt.scratch[thread].reset();
    fn(node, task, rt.scratch[thread]);
  });
}

void each_chunk(const Call& call, const char* name, const std::function<void(const RowChunk&, Scratch&)>& fn) {
  Runtime& rt = call.runtime;
  const Phase phase(rt.phases, name);
  rt.pool.run(int(call.routes.chunks.size()), [&](int task, int thread) {
    rt.scratch[thread].reset();
    fn(call.routes.chunks[task], rt.scratch[thread]);
  });
}

int gather_chunk(const Call& call, const TokenRows& tokens, const Gather& how, const RowChunk& chunk, bf16* out,
                 Scratch& scratch) {
  const VectorKernels& vec = call.vec();
  const int hidden = call.weights.shape().hidden, top_k = call.routes.top_k;
  bf16* const rows = scratch.take<bf16>(size_t(kTileRows) * hidden);
  bf16* const scaled = scratch.take<bf16>(size_t(kTileRows) * hidden);
  float* const spare = scratch.take<float>(size_t(hidden));
  const PackedMatrix down = call.weights.matrix(0, chunk.expert, kDown);
  const float* const scale = how.scaled ? down.row_scale : nullptr;
  const int end = how.pass == Pass::kForward ? chunk.rows : pad_rows(chunk.rows);  // only backward sums over rows
  int bad = -1;
  // Rows come from anywhere, and a store to a line that is in no cache waits for it as a load does: both are fetched
  // one strip ahead.
  const auto fetch_strip = [&](int t) {
    const size_t bytes = size_t(hidden) * dtype_bytes(tokens.dtype);
    for (int r = t; r < std::min(t + kTileRows, chunk.rows); r++)
      prefetch(static_cast<const char*>(tokens.data) + call.routes.token(chunk.begin + r) * bytes, bytes);
    prefetch(out + activation_elements(t, hidden), size_t(kTileRows) * hidden * sizeof(bf16));
  };
  fetch_strip(0);
  for (int t = 0; t < end; t += kTileRows) {
    if (t + kTileRows < end) fetch_strip(t + kTileRows);
    const bf16* at[kTileRows] = {};
    for (int r = 0; r < std::min(kTileRows, chunk.rows - t); r++) {
      const int route = call.routes.row_route[chunk.begin + t + r], token = route / top_k;
      at[r] = bf16_row(call, tokens, token, 0, hidden, rows + size_t(r) * hidden, spare);
      if (how.check && call.routes.leads(chunk.begin + t + r) && !vec.finite(hidden, at[r])) bad = token;
      if (how.bias_dots) how.bias_dots[chunk.begin + t + r] = vec.dot(hidden, at[r], down.bias);
      if (!scale) continue;
      vec.scale_row(hidden, at[r], scale, scaled + size_t(r) * hidden);
      at[r] = scaled + size_t(r) * hidden;
    }
    (how.pass == Pass::kForward ? vec.pack_forward : vec.pack_rows)(at, hidden, out + activation_elements(t, hidden));
    if (how.pass == Pass::kForward && vec.turned && chunk.rows <= kFewRows)
      for (int r = 0; r < chunk.rows; r++) place_few_row(at[r], r, hidden, out);
  }
  return bad;
}

void check_finite(const Call& call, int token) {
  KTFT_CHECK(token < 0, call.name, ": hidden states hold NaN or Inf (token ", token, " of ", call.routes.tokens,
             "). The layers before this one produced it: look for a too high learning rate, fp16 overflow (use bf16: "
             "true) or damaged weights");
}

Activations place_activations(const Call& call, Saved* saved, bool keep_gate_up) {
  const PackedExperts& w = call.weights;
  Workspace& ws = call.runtime.workspace;
  const size_t rows = size_t(call.routes.rows);
  const int packed = call.routes.packed_rows;
  const int shared = call.by_expert ? 0 : packed;  // rows of what otherwise lies in each thread's expert memory
  Activations act{};
  if (saved) saved->nodes.resize(w.nodes());
  if (call.int8) act.int8_x = place_int8(ws.x_codes, ws.x_scales, shared, w.shape().hidden, -1);
  for (int p = 0; p < 2; p++)
    if (const LoraPair* pair = call.pair(kGateUp[p])) {
      const size_t count = rows * pair->rank();
      if (saved) saved->low_rank[p] = call.runtime.buffers.take(count * sizeof(float), -1);
      act.low_rank[p] = {saved ? reinterpret_cast<float*>(saved->low_rank[p].data()) : ws.low_rank[p].get<float>(count),
                         ws.low_rank_operand[p].get<bf16>(activation_elements(shared, split_rank(pair->rank())))};
    }
  for (int n = 0; n < w.nodes(); n++) {
    const int id = call.runtime.node_ids[n];
    const size_t count = activation_elements(packed, w.width(n));
    NodeWorkspace& node = ws.nodes[n];
    Activations::PerNode out{nullptr, nullptr, node.h.get<bf16>(activation_elements(shared, w.width(n)), id), {}};
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
    if (const LoraPair* pair = call.pair(kDown)) {
      const size_t low = rows * pair->rank();
      if (saved) saved->nodes[n].low_rank_down = call.runtime.buffers.take(low * sizeof(float), id);
      out.down = {
          saved ? reinterpret_cast<float*>(saved->nodes[n].low_rank_down.data())
                : node.low_rank[int(kDown)].get<float>(low, id),
          node.low_rank_operand[int(kDown)].get<bf16>(activation_elements(shared, split_rank(pair->rank())), id)};
    }
    if (call.int8) out.int8_h = place_int8(node.h_codes, node.h_scales, shared, w.width(n), id);
    act.nodes.push_back(out);
  }
  return act;
}

void input_low_rank(const Call& call, const PackedLora& lora, const bf16* x, const Activations& act,
                    const RowChunk& chunk, Scratch& scratch) {
  const int hidden = call.weights.shape().hidden;
  const bf16* const rows = x + activation_elements(chunk.packed, hidden);
  for (int p = 0; p < 2; p++)
    if (const LoraPair* pair = call.pair(kGateUp[p])) {
      scratch.reset();
      low_rank_product(call, Pass::kForward, lora.a(call, kGateUp[p], chunk.slot, 0), pair->rank(),
                       dropped(call, kGateUp[p], chunk, rows, hidden, 0, scratch), chunk, act.low_rank[p], scratch);
    }
}

void gate_up_block(const Call& call, const PackedLora& lora, const bf16* x, const Activations& act, int node,
                   const RowChunk& rows, int block, Scratch& scratch) {
  const PackedExperts& w = call.weights;
  const int width = w.width(node), col = block * call.block / 2, cols = std::min(call.block / 2, width - col);
  GemmArgs args{{}, 2, cols, rows.rows, scratch.take<char>(kGemmScratch)};
  PackedMatrix matrix[2], b[2];
  for (int p = 0; p < 2; p++) {
    matrix[p] = w.matrix(node, rows.expert, kGateUp[p]);
    args.terms[p] = {&matrix[p], col,     x ? x + activation_elements(rows.packed, w.shape().hidden) : x, nullptr,
                     col,        nullptr, scratch.take<float>(size_t(pad_rows(rows.rows)) * cols)};
    if (const LoraPair* pair = call.pair(kGateUp[p])) {
      b[p] = lora.b(call, kGateUp[p], rows.slot, node);
      args.terms[p].lora = &b[p];
      args.terms[p].low_rank = act.low_rank[p].operand_at(rows, pair->rank());
    }
  }
  product(call, args, act.int8_x, rows, scratch);
  const Activations::PerNode& out = act.nodes[node];
  const size_t at = activation_elements(rows.packed, width) + size_t(col) * kTileRows;
  call.vec().swiglu({call.swiglu, rows.rows, cols, args.terms[0].c, args.terms[1].c, affine_at(matrix[0], col),
                     affine_at(matrix[1], col), out.h + at, out.gate ? out.gate + at : nullptr,
                     out.gate ? out.up + at : nullptr, strip_elements(width)});
}

void hidden_low_rank(const Call& call, const PackedLora& lora, const Activations& act, int node, const RowChunk& chunk,
                     Scratch& scratch) {
  const int width = call.weights.width(node);
  const bf16* const h = act.nodes[node].h + activation_elements(chunk.packed, width);
  low_rank_product(call, Pass::kForward, lora.a(call, kDown, chunk.slot, node), call.pair(kDown)->rank(),
                   dropped(call, kDown, chunk, h, width, call.weights.begin(node), scratch), chunk,
                   act.nodes[node].down, scratch);
}

void down_block(const Call& call, const PackedLora& lora, const Activations& act, int node, const RowChunk& rows,
                int block, bf16* y, Scratch& scratch) {
  const PackedExperts& w = call.weights;
  const int hidden = w.shape().hidden, col = block * call.block, cols = std::min(call.block, hidden - col);
  const PackedMatrix matrix = w.matrix(node, rows.expert, kDown);
  PackedMatrix b;
  float* const c = scratch.take<float>(size_t(pad_rows(rows.rows)) * cols);
  GemmTerm term{&matrix, col, act.nodes[node].h + activation_elements(rows.packed, w.width(node)), nullptr, col,
                nullptr, c};
  if (const LoraPair* pair = call.pair(kDown)) {
    b = lora.b(call, kDown, rows.slot, node);
    term.lora = &b;
    term.low_rank = act.nodes[node].down.operand_at(rows, pair->rank());
  }
  product(call, {{term}, 1, cols, rows.rows, scratch.take<char>(kGemmScratch)}, act.nodes[node].int8_h, rows, scratch);
  call.vec().store_rows(Pass::kForward, rows.rows, cols, c, affine_at(matrix, col),
                        y + size_t(rows.begin) * hidden + col, hidden);
}

int gate_up_blocks(const Call& call, int node) { return ceil_div(call.weights.width(node), call.block / 2); }

int hidden_blocks(const Call& call) { return ceil_div(call.weights.shape().hidden, call.block); }

void gate_up(const Call& call, const PackedLora& lora, const TokenRows& tokens, const Activations& act) {
  const Routes& routes = call.routes;
  Runtime& rt = call.runtime;
  const int hidden = call.weights.shape().hidden;
  // Quantized at once, rows that no adapter needs do not leave L2
  const bool keeps = !call.int8 || call.lora;
  bf16* const x = keeps ? rt.workspace.x.get<bf16>(activation_elements(routes.packed_rows, hidden)) : nullptr;
  std::atomic<int> bad{-1};
  each_chunk(call, "gather", [&](const RowChunk& chunk, Scratch& scratch) {
    bf16* const rows = keeps ? x + activation_elements(chunk.packed, hidden)
                             : scratch.take<bf16>(activation_elements(pad_rows(chunk.rows), hidden));
    const int token = gather_chunk(call, tokens, {Pass::kForward, true, false}, chunk, rows, scratch);
    if (token >= 0) bad = token;
    if (call.int8) quantize(call, rows, hidden, chunk, act.int8_x);
    if (call.lora) input_low_rank(call, lora, x, act, chunk, scratch);
  });
  check_finite(call, bad);
  each_node(
      call, "gate, up", [&](int n) { return int(routes.calls.size()) * gate_up_blocks(call, n); },
      [&](int node, int task, Scratch& scratch) {
        const int blocks = gate_up_blocks(call, node);
        gate_up_block(call, lora, x, act, node, routes.calls[task / blocks], task % blocks, scratch);
      });
  if (call.pair(kDown))
    each_node(
        call, "lora A h", [&](int) { return int(routes.chunks.size()); },
        [&](int node, int task, Scratch& scratch) {
          hidden_low_rank(call, lora, act, node, routes.chunks[task], scratch);
        });
}

std::vector<bf16*> place_rows(const Call& call) {
  std::vector<bf16*> y;
  const size_t count = size_t(call.routes.rows) * call.weights.shape().hidden;
  for (int n = 0; n < call.weights.nodes(); n++)
    y.push_back(call.runtime.workspace.nodes[n].y.get<bf16>(count, call.runtime.node_ids[n]));
  return y;
}

void combine(const Call& call, const std::vector<bf16*>& y, bool weighted, void* out, Dtype dtype) {
  const Phase phase(call.runtime.phases, "combine");
  const Routes& routes = call.routes;
  const int hidden = call.weights.shape().hidden, nodes = int(y.size()), top_k = routes.top_k;
  const int blocks = ceil_div(routes.tokens, kTokensPerTask);
  const int parts = blocks < call.runtime.pool.threads() ? ceil_div(hidden, kColsPerTask) : 1;
  call.runtime.pool.run(blocks * parts, [&](int task, int thread) {
    const int first = task / parts * kTokensPerTask, col = task % parts * kColsPerTask;
    const int cols = parts == 1 ? hidden : std::min(kColsPerTask, hidden - col);
    Scratch& scratch = call.runtime.scratch[thread];
    scratch.reset();
    float* const spare = scratch.take<float>(size_t(cols));
    std::vector<const bf16*> rows(size_t(top_k) * nodes);
    std::vector<float> weights(rows.size());
    for (int t = first; t < std::min(routes.tokens, first + kTokensPerTask); t++) {
      int count = 0;
      for (int i = 0; i < top_k * nodes; i++) {
        const int route = t * top_k + i / nodes, row = routes.route_row[route];
        if (row == kElsewhere) continue;
        rows[count] = y[i % nodes] + size_t(row) * hidden + col;
        weights[count++] = weighted ? call.top_k_weights[route] : 1.f;
      }
      const size_t at = size_t(t) * hidden + col;
      float* const sum = dtype == Dtype::kF32 ? static_cast<float*>(out) + at : spare;
      call.vec().weighted_sum(cols, count, rows.data(), weights.data(), sum);
      if (dtype == Dtype::kBf16) call.vec().narrow(cols, sum, static_cast<bf16*>(out) + at);
      if (dtype == Dtype::kF16)
        for (int c = 0; c < cols; c++) static_cast<uint16_t*>(out)[at + c] = float_to_half(sum[c]);
    }
  });
}

void forward(const Call& call, const TokenRows& hidden, void* out, Saved* saved, bool retain) {
  reserve_scratch(call);
  const PackedLora lora = pack_lora(call);
  const Activations act = place_activations(call, retain ? saved : nullptr, false);
  if (saved) saved->retained = retain;
  for (int p = 0; saved && p < kProjections; p++)
    if (const LoraPair* pair = call.pair(Projection(p))) saved->ranks[p] = pair->rank();
  const std::vector<bf16*> y = place_rows(call);
  if (call.by_expert) {
    forward_by_expert(call, hidden, act, y[0]);
  } else {
    gate_up(call, lora, hidden, act);
    if (call.int8)
      each_node(
          call, "quantize h", [&](int) { return int(call.routes.chunks.size()); },
          [&](int node, int task, Scratch&) { quantize_h(call, act, node, call.routes.chunks[task]); });
    const int blocks = hidden_blocks(call);
    each_node(
        call, "down", [&](int) { return int(call.routes.calls.size()) * blocks; },
        [&](int node, int task, Scratch& scratch) {
          down_block(call, lora, act, node, call.routes.calls[task / blocks], task % blocks, y[node], scratch);
        });
  }
  combine(call, y, true, out, hidden.dtype);
}

}  // namespace ktft
