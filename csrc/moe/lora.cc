#include "moe/lora.h"

#include <algorithm>
#include <utility>

#include "moe/call.h"

namespace ktft {
namespace {

uint64_t mix(uint64_t z) {  // splitmix64's finalizer
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

// Returns n elements from `at` of one expert's matrix as fp32: in place, or widened into `spare`.
const float* read(const VectorKernels& vec, const LoraMatrix& m, int expert, size_t at, int n, float* spare) {
  at += size_t(expert) * m.rows * m.cols;
  if (m.dtype == Dtype::kF32) return static_cast<const float*>(m.data) + at;
  const bf16* const x = static_cast<const bf16*>(m.data) + at;
  if (n % 16 == 0)
    vec.widen(n, x, spare);
  else
    for (int i = 0; i < n; i++) spare[i] = to_float(x[i]);
  return spare;
}

// Packs A's rows [block, block + 16) into strips of high and of low parts, node by node.
void pack_a(const Call& call, const LoraPair& pair, bool sliced, int expert, int block, bf16* out, Scratch& scratch) {
  const VectorKernels& vec = call.vec();
  const int cols = pair.a.cols, rows = std::min(kRankBlock, pair.rank() - block);
  float* const spare = scratch.take<float>(size_t(kRankBlock) * cols);
  const float* from[kRankBlock];
  for (int j = 0; j < rows; j++)
    from[j] = read(vec, pair.a, expert, size_t(block + j) * cols, cols, spare + size_t(j) * cols);
  const int strips = split_rank(pair.rank()) / kTileRows, nodes = sliced ? call.weights.nodes() : 1;
  for (int n = 0; n < nodes; n++) {
    const int begin = sliced ? call.weights.begin(n) : 0, width = sliced ? call.weights.width(n) : cols;
    const size_t strip = size_t(kTileRows) * width;
    bf16* high = out + size_t(strips) * kTileRows * begin + block / kRankBlock * 2 * strip;
    for (int col = begin; col < begin + width; col += 32, high += kPieceElements) {
      for (int j = 0; j < rows; j++)
        vec.split(32, from[j] + col, call.lora->keep_scale(), high + j * 32, high + strip + j * 32);
      for (bf16* piece : {high, high + strip})
        std::memset(piece + rows * 32, 0, size_t(kTileRows - rows) * 32 * sizeof(bf16));
    }
  }
}

// Packs B's rows [row, row + 16) into one strip. `wide` has room for 16 * rank elements, `parts` for twice as many.
void pack_b(const Call& call, const LoraPair& pair, const float* row_scale, int expert, int row, bf16* out, float* wide,
            bf16* parts) {
  const VectorKernels& vec = call.vec();
  const int rank = pair.rank(), count = kTileRows * rank;
  bf16 *const high = parts, *const low = parts + count;
  const float* const from = read(vec, pair.b, expert, size_t(row) * rank, count, wide);
  if (row_scale)
    for (int r = 0; r < kTileRows; r++) {
      const float factor = pair.scaling / row_scale[row + r];
      for (int i = r * rank; i < (r + 1) * rank; i++) wide[i] = from[i] * factor;
    }
  vec.split(count, row_scale ? wide : from, row_scale ? 1.f : pair.scaling, high, low);
  std::memset(out, 0, size_t(kTileRows) * split_rank(rank) * sizeof(bf16));
  const auto copy = [](const bf16* from, int n, bf16* to) {
    constexpr int kAtOnce = 8;
    for (; n >= kAtOnce; n -= kAtOnce, from += kAtOnce, to += kAtOnce) std::memcpy(to, from, kAtOnce * sizeof(bf16));
    for (int i = 0; i < n; i++) to[i] = from[i];
  };
  for (int block = 0; block < rank; block += kRankBlock, out += kPieceElements)
    for (int r = 0; r < kTileRows; r++) {
      const int n = std::min(kRankBlock, rank - block), at = r * rank + block;
      copy(high + at, n, out + r * 32);
      copy(low + at, n, out + r * 32 + kRankBlock);
    }
}

// LoRA matrices have few rows or columns, so their strips need no padding.
PackedMatrix dense_matrix(bf16* pieces, int rows, int cols) {
  return bf16_matrix(pieces, rows, cols, int64_t(cols) * kTileRows);
}

// The index of element (t, c) in a piece.
int piece_index(bool turned, int t, int c) { return turned ? c / 2 * 32 + t * 2 + c % 2 : t * 32 + c; }

// One part of an expert's packing.
struct Job {
  Projection p;
  bool is_b;
  int first, end;  // rows of A or B
};

std::vector<Job> jobs_of(const Call& call) {
  constexpr int kRows = 512;
  std::vector<Job> jobs;
  for (int p = 0; p < kProjections; p++) {
    const LoraPair* const pair = call.pair(Projection(p));
    if (!pair) continue;
    for (int j = 0; j < pair->rank(); j += kRankBlock)
      jobs.push_back({.p = Projection(p), .is_b = false, .first = j, .end = 0});
    for (int row = 0; row < pair->b.rows; row += kRows)
      jobs.push_back({.p = Projection(p), .is_b = true, .first = row, .end = std::min(row + kRows, pair->b.rows)});
  }
  return jobs;
}

size_t expert_elements(const LoraPair& pair) { return size_t(split_rank(pair.rank())) * (pair.a.cols + pair.b.rows); }

// Places each slot's A and B from `at` on. If `slots` is 0, all slots share one place.
PackedLora place_lora(const Call& call, int slots, bf16* at) {
  PackedLora packed;
  for (int p = 0; p < kProjections; p++) {
    const LoraPair* const pair = call.pair(Projection(p));
    if (!pair) continue;
    const size_t a = size_t(split_rank(pair->rank())) * pair->a.cols, count = std::max(slots, 1);
    packed.parts[p] = {.a = at,
                       .b = at + count * a,
                       .a_stride = slots ? a : 0,
                       .b_stride = slots ? expert_elements(*pair) - a : 0,
                       .places = split_rank(pair->rank())};
    at += count * expert_elements(*pair);
  }
  return packed;
}

void pack_part(const Call& call, const Job& job, const PackedLora& packed, int slot, Scratch& scratch) {
  const int expert = call.routes.active[slot];
  const LoraPair& pair = *call.pair(job.p);
  const PackedLora::Part& part = packed.parts[int(job.p)];
  const bool down = job.p == Projection::kDown;
  scratch.reset();
  if (!job.is_b) return pack_a(call, pair, down, expert, job.first, part.a + slot * part.a_stride, scratch);
  const int places = split_rank(pair.rank());
  float* const wide = scratch.take<float>(size_t(kTileRows) * pair.rank());
  bf16* const parts = scratch.take<bf16>(size_t(kTileRows) * pair.rank() * 2);
  for (int row = job.first; row < job.end; row += kTileRows) {
    int node = 0;  // row scales lie with the slices
    while (!down && row >= call.weights.begin(node) + call.weights.width(node)) node++;
    const float* scale = call.weights.matrix(node, expert, job.p).row_scale;
    if (scale && !down) scale -= call.weights.begin(node);
    pack_b(call, pair, scale, expert, row, part.b + slot * part.b_stride + size_t(row) * places, wide, parts);
  }
}

void pack_slots(const Call& call, const PackedLora& packed, int slots) {
  const std::vector<Job> jobs = jobs_of(call);
  call.runtime.pool.run(slots * int(jobs.size()), [&](int task, int thread) {
    pack_part(call, jobs[task % jobs.size()], packed, task / int(jobs.size()), call.runtime.scratch[thread]);
  });
}

}  // namespace

uint64_t Lora::key(Projection p, int route) const {
  return mix(mix(seed + 0x9e3779b97f4a7c15ull * (uint64_t(p) + 1)) + first_route + uint64_t(route));
}

PackedMatrix PackedLora::a(const Call& call, Projection p, int slot, int node) const {
  const int places = parts[int(p)].places;
  bf16* const at = parts[int(p)].a + (all ? call.routes.active[slot] : slot) * parts[int(p)].a_stride;
  if (p != Projection::kDown) return dense_matrix(at, places, call.weights.shape().hidden);
  return dense_matrix(at + size_t(places) * call.weights.begin(node), places, call.weights.width(node));
}

PackedMatrix PackedLora::b(const Call& call, Projection p, int slot, int node) const {
  const int places = parts[int(p)].places;
  bf16* const at = parts[int(p)].b + (all ? call.routes.active[slot] : slot) * parts[int(p)].b_stride;
  if (p == Projection::kDown) return dense_matrix(at, call.weights.shape().hidden, places);
  return dense_matrix(at + size_t(places) * call.weights.begin(node), call.weights.width(node), places);
}

PackedLora pack_expert_lora(const Call& call, int slot, Scratch& memory, Scratch& scratch) {
  if (!call.lora) return {};
  if (call.lora->kept) return call.lora->kept->packed;
  const PackedLora packed = place_lora(call, 0, memory.take<bf16>(call.dims.lora_elements()));
  for (const Job& job : jobs_of(call)) pack_part(call, job, packed, slot, scratch);
  return packed;
}

PackedLora pack_lora(const Call& call) {
  if (!call.lora || call.by_expert) return {};
  if (call.lora->kept) return call.lora->kept->packed;
  const Phase phase(call.runtime.phases, "lora pack");
  const int slots = int(call.routes.active.size());
  const PackedLora packed = place_lora(call, slots, call.workspace().lora.get<bf16>(call.sizes.lora));
  pack_slots(call, packed, slots);
  return packed;
}

std::shared_ptr<KeptLora> keep_lora(const Call& call) {
  const int experts = int(call.routes.active.size());
  const auto kept = std::make_shared<KeptLora>();
  const CallDims dims = dims_of(call);
  kept->memory = NodeBuffer(experts * dims.lora_elements() * sizeof(bf16), -1);
  kept->packed = place_lora(call, experts, reinterpret_cast<bf16*>(kept->memory.data()));
  kept->packed.all = true;
  for (Scratch& scratch : call.runtime.scratch) scratch.reserve(lora_scratch_size(dims));
  pack_slots(call, kept->packed, experts);
  return kept;
}

void Adapters::find(const Routes& routes) {
  std::vector<int> seen(loras.size(), kNoAdapter);  // the slot in which each adapter was seen last
  first = {0};
  for (const RowChunk& rows : routes.experts) {
    for (int row = rows.begin; row < rows.begin + rows.rows; row++) {
      const int adapter = of_token[routes.token(row)];
      if (adapter == kNoAdapter || std::exchange(seen[adapter], rows.slot) == rows.slot) continue;
      of_slot.push_back(adapter);
    }
    std::sort(of_slot.begin() + first.back(), of_slot.end());
    for (int i = first.back(); i < int(of_slot.size()); i++) {
      packed.push_back(packed_rows);
      packed_rows += pad_rows(rows.rows);
    }
    most = std::max(most, int(of_slot.size()) - first.back());
    first.push_back(int(of_slot.size()));
  }
}

void low_rank_product(const Call& call, Pass pass, const PackedMatrix& m, int rank, const bf16* x,
                      const RowChunk& chunk, const LowRank& out, Scratch& scratch, int adapter) {
  const VectorKernels& vec = call.vec();
  const int places = split_rank(rank), strips = pad_rows(chunk.rows) / kTileRows;
  float* const c = scratch.take<float>(size_t(strips) * kTileRows * kMaxOutputs);
  bf16* const twice = scratch.take<bf16>(size_t(strips) * kTileRows * places);
  char* const gemm = scratch.take<char>(kGemmScratch);
  std::fill(twice, twice + size_t(strips) * kTileRows * places, bf16{});
  for (int first = 0; first < places; first += kMaxOutputs) {
    const int outs = std::min(kMaxOutputs, places - first);
    run_gemm(call, Format::kBf16, pass,
             {.terms = {{.w = &m, .out_begin = first, .x = x, .c = c}},
              .out_count = outs,
              .tokens = chunk.rows,
              .scratch = gemm});
    if (pass == Pass::kForward) vec.unturn(outs / 32 * strips, c);
    for (int t = 0; t < chunk.rows; t++) {
      if (adapter != kNoAdapter && call.adapter(chunk.begin + t) != adapter) continue;
      for (int panel = 0; panel < outs / 32; panel++) {
        const float* const sums = c + result_piece(panel, t / kTileRows, chunk.rows) + t % kTileRows * 32;
        const int block = first / 32 + panel;
        for (int i = 0; i < std::min(kRankBlock, rank - block * kRankBlock); i++) {
          const float v = sums[i] + sums[kRankBlock + i];
          if (out.rows) out.rows[size_t(chunk.begin + t) * rank + block * kRankBlock + i] = v;
          bf16* const at = twice + size_t(t) * places + block * 32 + i;
          at[0] = at[kRankBlock] = to_bf16(v);
        }
      }
    }
  }
  if (!out.operand) return;
  for (int s = 0; s < strips; s++) {
    const bf16* rows[kTileRows];
    for (int r = 0; r < kTileRows; r++) rows[r] = twice + size_t(s * kTileRows + r) * places;
    (pass == Pass::kForward ? vec.pack_forward : vec.pack_rows)(
        rows, places, out.operand + activation_elements(chunk.packed + s * kTileRows, places));
  }
}

void drop_rows(const Call& call, Projection p, const RowChunk& chunk, bf16* x, int cols, int first, bool turned) {
  for (int t = 0; t < chunk.rows; t++) {
    const uint64_t key = call.lora->key(p, call.routes.row_route[chunk.begin + t]);
    for (int col = 0; col < cols; col += 32) {
      bf16* const piece = x + activation_elements(t / kTileRows * kTileRows, cols) + size_t(col) * kTileRows;
      uint32_t gone = ~call.vec().dropout_mask(key, uint32_t(first + col), call.lora->dropout);
      for (; gone; gone &= gone - 1) piece[piece_index(turned, t % kTileRows, __builtin_ctz(gone))] = {};
    }
  }
}

void add_dropped(const Call& call, Projection p, const RowChunk& chunk, const float* lora, int cols, int first,
                 float* c) {
  for (int t = 0; t < chunk.rows; t++) {
    const uint64_t key = call.lora->key(p, call.routes.row_route[chunk.begin + t]);
    for (int col = 0; col < cols; col += 32) {
      const int64_t at = result_piece(col / 32, t / kTileRows, chunk.rows) + t % kTileRows * 32;
      const uint32_t stays = call.vec().dropout_mask(key, uint32_t(first + col), call.lora->dropout);
      for (int i = 0; i < 32; i++) c[at + i] += stays >> i & 1 ? lora[at + i] : 0.f;
    }
  }
}

void transpose_low_rank(const Call& call, const std::vector<const float*>& parts, int rank, const RowChunk& expert,
                        bool weighted, bf16* out, Scratch& scratch) {
  const int cols = pad_rows(expert.rows), blocks = ceil_div(rank, kRankBlock);
  float* const wide = scratch.take<float>(size_t(cols));
  bf16* const values = scratch.take<bf16>(size_t(cols) * 2 * kRankBlock);
  for (int b = 0; b < blocks; b++) {
    const bf16 *high[kTileRows] = {}, *low[kTileRows] = {};
    for (int j = 0; j < std::min(kRankBlock, rank - b * kRankBlock); j++) {
      for (int t = 0; t < expert.rows; t++) {
        const int row = expert.begin + t;
        float v = 0;
        for (const float* part : parts) v += part[size_t(row) * rank + b * kRankBlock + j];
        wide[t] = weighted ? v * call.row_weight(row) : v;
      }
      std::fill(wide + expert.rows, wide + cols, 0.f);
      bf16* const at = values + size_t(j) * 2 * cols;
      call.vec().split(cols, wide, 1.f, at, at + cols);
      high[j] = at;
      low[j] = at + cols;
    }
    call.vec().pack_rows(high, cols, out + activation_elements(b * 2 * kTileRows, cols));
    call.vec().pack_rows(low, cols, out + activation_elements((b * 2 + 1) * kTileRows, cols));
  }
}

}  // namespace ktft
