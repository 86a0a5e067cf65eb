#include "moe/few_lora.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace ktft {
namespace {

constexpr Projection kDown = Projection::kDown;
constexpr int kBits = 16;  // of activations, for weights in bf16
// In place of the tasks left. None left is not enough: the thread that ends the last one then places the operands.
constexpr int kKnown = -1;

}  // namespace

FewLora::FewLora(const Call& call)
    : call_(call),
      kernels_(strip_kernels(call.runtime.isa, Format::kBf16)),
      rows_(call.routes.rows),
      hidden_(call.weights.shape().hidden),
      width_(call.weights.width(0)),
      left_(call.routes.experts.size()),
      x_(size_t(call.routes.rows)),
      h_(size_t(call.routes.rows)) {
  const Adapters& adapters = *call.adapters;
  for (const Lora* lora : adapters.loras)
    for (int p = 0; p < kProjections; p++)
      if (const LoraPair* pair = lora->pair(Projection(p))) places_ = std::max(places_, split_rank(pair->rank()));
  for (int e = 0; e < int(call.routes.experts.size()); e++) {
    const size_t before = jobs_.size();
    const int slot = call.routes.experts[e].slot;
    for (int i = adapters.first[slot]; i < adapters.first[slot + 1]; i++)
      for (const Projection p : call.weights.shape().inputs())
        if (const LoraPair* const found = pair(adapters.of_slot[i], p))
          for (int block = 0; block < ceil_div(found->rank(), kRankBlock); block++)
            jobs_.push_back({.expert = e, .adapter = adapters.of_slot[i], .p = p, .block = block});
    const int own = int(jobs_.size() - before);
    left_[e].store(own ? own : kKnown, std::memory_order_relaxed);
  }
}

size_t FewLora::bytes() const {
  const size_t rows = size_t(rows_) * kProjections;
  return size_t(call_.routes.tokens) * kernels_.row_bytes(hidden_) + size_t(rows_) * kernels_.row_bytes(width_) +
         rows * (in_lines(size_t(places_) * sizeof(bf16)) + kernels_.row_bytes(places_));
}

void FewLora::take(char* memory) {
  tokens_ = memory;
  hidden_rows_ = tokens_ + size_t(call_.routes.tokens) * kernels_.row_bytes(hidden_);
  placed_ = hidden_rows_ + size_t(rows_) * kernels_.row_bytes(width_);
  operands_ = placed_ + size_t(rows_) * kProjections * kernels_.row_bytes(places_);
  std::memset(operands_, 0, size_t(rows_) * kProjections * in_lines(size_t(places_) * sizeof(bf16)));
  for (int row = 0; row < rows_; row++) {
    x_[row] = tokens_ + call_.routes.token(row) * kernels_.row_bytes(hidden_);
    h_[row] = hidden_row(row);
  }
}

bf16* FewLora::operand(Projection p, int row) const {
  const size_t each = in_lines(size_t(places_) * sizeof(bf16));
  return reinterpret_cast<bf16*>(operands_ + (size_t(row) * kProjections + int(p)) * each);
}

char* FewLora::placed(Projection p, int row) const {
  return placed_ + (size_t(row) * kProjections + int(p)) * kernels_.row_bytes(places_);
}

void FewLora::place(int token, const bf16* row) {
  if (call_.adapters->of_token[token] != kNoAdapter)
    kernels_.place(row, hidden_, kBits, tokens_ + token * kernels_.row_bytes(hidden_));
}

void FewLora::low_rank(int task) {
  const Job& job = jobs_[task];
  multiply(job, x_);
  if (left_[job.expert].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  place_operands(call_.routes.experts[job.expert], {Projection::kGate, Projection::kUp});
  left_[job.expert].store(kKnown, std::memory_order_release);
}

void FewLora::await_low_rank(const RowChunk& expert) const {
  const std::atomic<int>& left = left_[size_t(&expert - call_.routes.experts.data())];
  const auto known = [&] { return left.load(std::memory_order_acquire) == kKnown; };
  while (!known() && !spin(std::chrono::milliseconds(1), known)) {
  }
}

void FewLora::hidden_low_rank(const RowChunk& expert, const char* h, size_t narrow) {
  const Adapters& adapters = *call_.adapters;
  const int number = int(&expert - call_.routes.experts.data());
  for (int row = expert.begin; row < expert.begin + expert.rows; row++)
    if (call_.adapter(row) != kNoAdapter)
      kernels_.place(reinterpret_cast<const bf16*>(h + row * narrow), width_, kBits, hidden_row(row));
  for (int i = adapters.first[expert.slot]; i < adapters.first[expert.slot + 1]; i++)
    if (const LoraPair* const found = pair(adapters.of_slot[i], kDown))
      for (int block = 0; block < ceil_div(found->rank(), kRankBlock); block++)
        multiply({.expert = number, .adapter = adapters.of_slot[i], .p = kDown, .block = block}, h_);
  place_operands(expert, {kDown});
}

void FewLora::multiply(const Job& job, const std::vector<const void*>& x_of_row) {
  const RowChunk& expert = call_.routes.experts[job.expert];
  const PackedMatrix a = call_.adapters->loras[job.adapter]->kept->packed.a(call_, job.p, expert.slot, 0);
  const int ranks = std::min(kRankBlock, pair(job.adapter, job.p)->rank() - job.block * kRankBlock);
  for (int at = 0; at < expert.rows;) {
    const void* x[kFewRows];
    int row[kFewRows], few = 0;
    for (; at < expert.rows && few < kFewRows; at++)
      if (call_.adapter(expert.begin + at) == job.adapter) {
        row[few] = expert.begin + at;
        x[few++] = x_of_row[expert.begin + at];
      }
    if (!few) return;
    alignas(64) float high[kFewRows * kTileRows], low[kFewRows * kTileRows];
    const int strip = 2 * job.block;
    kernels_.product({&a, strip, x, few, a.tile(strip + 1, 0), high});
    kernels_.product({&a, strip + 1, x, few, nullptr, low});
    for (int t = 0; t < few; t++) {
      bf16* const to = operand(job.p, row[t]) + job.block * 2 * kRankBlock;
      for (int i = 0; i < ranks; i++)
        to[i] = to[kRankBlock + i] = to_bf16(high[t * kTileRows + i] + low[t * kTileRows + i]);
    }
  }
}

void FewLora::place_operands(const RowChunk& expert, std::initializer_list<Projection> projections) {
  for (int row = expert.begin; row < expert.begin + expert.rows; row++) {
    const int adapter = call_.adapter(row);
    if (adapter == kNoAdapter) continue;
    for (const Projection p : projections)
      if (const LoraPair* const found = pair(adapter, p))
        kernels_.place(operand(p, row), split_rank(found->rank()), kBits, placed(p, row));
  }
}

void FewLora::add(Projection p, const RowChunk& expert, int row, int strip, float* results) const {
  const int adapter = call_.adapter(row);
  if (adapter == kNoAdapter || !pair(adapter, p)) return;
  const PackedMatrix b = call_.adapters->loras[adapter]->kept->packed.b(call_, p, expert.slot, 0);
  const void* const x = placed(p, row);
  alignas(64) float sums[kTileRows];
  const uint8_t* const next = (strip + 1) * kTileRows < b.rows ? b.tile(strip + 1, 0) : nullptr;
  kernels_.product({&b, strip, &x, 1, next, sums});
  for (int r = 0; r < kTileRows; r++) results[r] += sums[r];
}

}  // namespace ktft
