#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>

#include "moe/few_lora.h"
#include "moe/passes.h"
#include "moe/tokens.h"

namespace ktft {
namespace {

constexpr int kMostTokens = 64;

// The more threads there are, the longer most of them would wait for the one that takes the last expert. Measured with
// 2 threads, where strips are up to a fifth slower than whole experts, and with 14 and 16.
bool takes_whole_experts(int experts, int threads) { return 2 * experts >= threads * threads; }

template <class Done>
void await(const Done& done) {
  while (!done() && !spin(std::chrono::milliseconds(1), done)) {
  }
}

// One call. First every token's row is prepared. Then come adapters' A x, if there are any. What is left has two
// orders:
//   with many threads   gate and up, some strips of an expert a task; then down, some outputs of all experts a task
//   with few            a whole expert a task, whose weights are read in three long runs; then its rows are added up
// Threads meet once, before the last kind of task. Tasks are taken in order and wait for earlier ones alone, so some
// thread can always go on; none may throw, since others would then wait for ever.
class FewRows {
 public:
  FewRows(Call& call, const TokenRows& hidden, void* out)
      : call_(call),
        routes_(call.routes),
        weights_(call.weights),
        kernels_(strip_kernels(call.runtime.isa, call.weights.format())),
        hidden_(hidden),
        out_(out),
        experts_(int(call.routes.experts.size())),
        width_(call.weights.width(0)),
        size_(call.weights.shape().hidden),
        threads_(call.runtime.pool.threads()),
        whole_(takes_whole_experts(experts_, threads_)),
        gate_strips_(whole_ ? width_ / kTileRows
                            : std::clamp(experts_ * (width_ / kTileRows) / (kPerThread * threads_), 1, kMostStrips)),
        down_strips_(std::clamp(size_ / kTileRows / (kPerThread * threads_), 1, kMostStrips)),
        gate_tasks_(ceil_div(width_ / kTileRows, gate_strips_)),
        x_bytes_(kernels_.row_bytes(size_)),
        h_bytes_(kernels_.row_bytes(width_)),
        left_(size_t(experts_)) {
    const size_t wide = in_lines(size_t(size_) * (sizeof(bf16) + sizeof(float))),
                 narrow = in_lines(size_t(width_) * sizeof(bf16));
    const size_t tokens = size_t(routes_.tokens), rows = size_t(routes_.rows);
    if (call.adapters) lora_.emplace(call);
    const size_t sums = whole_ ? rows * size_t(size_) * sizeof(float) : 0;
    const size_t own = tokens * (x_bytes_ + wide) + rows * (h_bytes_ + narrow) + sums;
    x_ = call.workspace().few_rows.get<char>(own + (lora_ ? lora_->bytes() : 0));
    if (lora_) lora_->take(x_ + own);
    placed_h_ = x_ + tokens * x_bytes_;
    converted_ = placed_h_ + rows * h_bytes_;
    h_ = converted_ + tokens * wide;
    outputs_ = reinterpret_cast<float*>(h_ + rows * narrow);
    wide_ = wide;
    narrow_ = narrow;
    for (std::atomic<int>& left : left_) left.store(gate_tasks_, std::memory_order_relaxed);
  }

  void run() {
    const int tokens = routes_.tokens, low = lora_ ? lora_->tasks() : 0, gates = experts_ * gate_tasks_,
              downs = ceil_div(size_ / kTileRows, down_strips_);
    const Phase phase(call_.runtime.phases, "few rows");
    call_.runtime.pool.run(tokens + low + gates + downs, [&](int task, int) {
      if (task < tokens)
        place(task);
      else if (task < tokens + low)
        low_rank(task - tokens);
      else if (task < tokens + low + gates)
        gate_up(task - tokens - low, gates);
      else
        down(task - tokens - low - gates);
    });
    check_finite(call_, bad_);
  }

 private:
  static constexpr int kPerThread = 16, kMostStrips = 8;

  bool has_rows(int token) const {
    const int* const row = routes_.route_row.data() + size_t(token) * routes_.top_k;
    return std::any_of(row, row + routes_.top_k, [](int at) { return at != kElsewhere; });
  }

  void place(int token) {
    if (has_rows(token)) {
      char* const at = converted_ + token * wide_;
      const bf16* const row = bf16_row(call_, hidden_, token, 0, size_, reinterpret_cast<bf16*>(at),
                                       reinterpret_cast<float*>(at + size_t(size_) * sizeof(bf16)));
      if (!call_.vec().finite(size_, row)) bad_ = token;
      kernels_.place(row, size_, call_.activation_bits, x_ + token * x_bytes_);
      if (lora_) lora_->place(token, row);
    }
    placed_.fetch_add(1, std::memory_order_release);
  }

  void await_tokens() const {
    await([&] { return placed_.load(std::memory_order_acquire) == routes_.tokens; });
  }

  void low_rank(int task) {
    await_tokens();
    lora_->low_rank(task);
  }

  // The gate's strip that a later task begins with, or null.
  const uint8_t* gate_strip(int task, int gates) const {
    if (task >= gates) return nullptr;
    const Projection first = weights_.shape().inputs()[0];
    return weights_.matrix(0, routes_.experts[task / gate_tasks_].expert, first)
        .tile(task % gate_tasks_ * gate_strips_, 0);
  }

  void gate_up(int task, int gates) {
    const RowChunk& rows = routes_.experts[task / gate_tasks_];
    const int begin = task % gate_tasks_ * gate_strips_, end = std::min(begin + gate_strips_, width_ / kTileRows);
    // As far as one can guess, what this thread begins with next
    const uint8_t* const after = gate_strip(task + threads_, gates);
    await_tokens();
    for (int strip = begin; strip < end; strip += kMostStrips) {
      const int to = std::min(strip + kMostStrips, end);
      const uint8_t* const next = to < end ? weights_.matrix(0, rows.expert, weights_.shape().inputs()[0]).tile(to, 0)
                                  : whole_ ? down_strip(rows, 0)
                                           : after;
      for (int first = 0; first < rows.rows; first += kStripRows) hidden(rows, first, strip, to, next);
    }
    if (left_[task / gate_tasks_].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    for (int row = rows.begin; row < rows.begin + rows.rows; row++)
      kernels_.place(h_row(row), width_, call_.activation_bits, placed_h_ + row * h_bytes_);
    if (lora_) lora_->hidden_low_rank(rows, h_, narrow_);
    if (whole_) outputs(rows, after);
    finished_.fetch_add(1, std::memory_order_release);
  }

  // h of some strips and at most kStripRows rows of an expert, from `first` on: gate's strips, then those of up. `next`
  // is read thereafter.
  void hidden(const RowChunk& rows, int first, int begin, int end, const uint8_t* next) {
    const std::span<const Projection> inputs = weights_.shape().inputs();
    const int count = int(inputs.size()), few = std::min(kStripRows, rows.rows - first), row = rows.begin + first;
    const void* x[kStripRows];
    for (int t = 0; t < few; t++) x[t] = x_ + routes_.token(row + t) * x_bytes_;
    PackedMatrix matrix[2];
    for (int i = 0; i < count; i++) matrix[i] = weights_.matrix(0, rows.expert, inputs[i]);
    alignas(64) float results[2][kMostStrips][kStripRows * kTileRows];
    for (int i = 0; i < count; i++)
      for (int strip = begin; strip < end; strip++) {
        const uint8_t* const ahead = strip + 1 < end ? matrix[i].tile(strip + 1, 0)
                                     : i + 1 < count ? matrix[i + 1].tile(begin, 0)
                                                     : next;
        float* const to = results[i][strip - begin];
        kernels_.product({&matrix[i], strip, x, few, first ? nullptr : ahead, to, call_.activation_bits});
      }
    if (lora_) lora_->await_low_rank(rows);
    for (int strip = begin; strip < end; strip++) {
      const int col = strip * kTileRows;
      for (int t = 0; t < few; t++) {
        float* const gate = results[0][strip - begin] + t * kTileRows;
        float* const up = results[count - 1][strip - begin] + t * kTileRows;
        if (lora_)
          for (int i = 0; i < count; i++)
            lora_->add(inputs[i], rows, row + t, strip, results[i][strip - begin] + t * kTileRows);
        call_.vec().swiglu_strip(call_.swiglu, gate, up, affine_at(matrix[0], col), affine_at(matrix[count - 1], col),
                                 h_row(row + t) + col);
      }
    }
  }

  // The weighted outputs of one expert's rows; `after` is read thereafter.
  void outputs(const RowChunk& rows, const uint8_t* after) {
    const int strips = size_ / kTileRows;
    for (int strip = 0; strip < strips; strip++)
      weighted(rows, strip, strip + 1 < strips ? down_strip(rows, strip + 1) : after,
               [&](int row, const float* values) { std::copy_n(values, kTileRows, output(row, strip)); });
  }

  void down(int task) {
    const int begin = task * down_strips_, end = std::min(begin + down_strips_, size_ / kTileRows);
    // While the last of gate and up are computed, memory has nothing else to do
    if (!whole_) prefetch(down_strip(routes_.experts[0], begin), kAhead);
    await([&] { return finished_.load(std::memory_order_acquire) == experts_; });
    for (int strip = begin; strip < end; strip++) {
      alignas(64) float sums[kMostTokens * kTileRows] = {};
      const auto add = [&](int row, const float* values) {
        float* const to = sums + routes_.token(row) * kTileRows;
        for (int r = 0; r < kTileRows; r++) to[r] += values[r];
      };
      for (int i = 0; i < experts_; i++) {
        const RowChunk& rows = routes_.experts[i];
        if (whole_) {
          for (int row = rows.begin; row < rows.begin + rows.rows; row++) add(row, output(row, strip));
          continue;
        }
        const uint8_t* const next = i + 1 < experts_  ? down_strip(routes_.experts[i + 1], strip)
                                    : strip + 1 < end ? down_strip(routes_.experts[0], strip + 1)
                                                      : nullptr;
        weighted(rows, strip, next, add);
      }
      store(strip, sums);
    }
  }

  const uint8_t* down_strip(const RowChunk& rows, int strip) const {
    return weights_.matrix(0, rows.expert, Projection::kDown).tile(strip, 0);
  }

  // Calls fn(row, values) with 16 weighted outputs of each row of an expert.
  template <class Fn>
  void weighted(const RowChunk& rows, int strip, const uint8_t* next, const Fn& fn) const {
    const PackedMatrix matrix = weights_.matrix(0, rows.expert, Projection::kDown);
    const Affine affine = affine_at(matrix, strip * kTileRows);
    for (int first = 0; first < rows.rows; first += kStripRows) {
      const int few = std::min(kStripRows, rows.rows - first), row = rows.begin + first;
      const void* h[kStripRows];
      for (int t = 0; t < few; t++) h[t] = placed_h_ + (row + t) * h_bytes_;
      alignas(64) float results[kStripRows * kTileRows];
      kernels_.product({&matrix, strip, h, few, first ? nullptr : next, results, call_.activation_bits});
      for (int t = 0; t < few; t++) {
        float* const values = results + t * kTileRows;
        if (lora_) lora_->add(Projection::kDown, rows, row + t, strip, values);
        const float weight = call_.row_weight(row + t);
        apply_affine(affine, kTileRows, values);
        for (int r = 0; r < kTileRows; r++) values[r] *= weight;
        fn(row + t, values);
      }
    }
  }

  void store(int strip, const float* sums) const {
    for (int t = 0; t < routes_.tokens; t++) {
      const size_t at = size_t(t) * size_ + strip * kTileRows;
      const float* const from = sums + t * kTileRows;
      if (hidden_.dtype == Dtype::kBf16)
        call_.vec().narrow(kTileRows, from, static_cast<bf16*>(out_) + at);
      else if (hidden_.dtype == Dtype::kF32)
        std::copy_n(from, kTileRows, static_cast<float*>(out_) + at);
      else
        for (int r = 0; r < kTileRows; r++) static_cast<uint16_t*>(out_)[at + r] = float_to_half(from[r]);
    }
  }

  bf16* h_row(int row) const { return reinterpret_cast<bf16*>(h_ + row * narrow_); }
  float* output(int row, int strip) const { return outputs_ + size_t(row) * size_ + strip * kTileRows; }

  static constexpr size_t kAhead = 4 << 10;  // bytes of a strip, whatever its format

  Call& call_;
  const Routes& routes_;
  const PackedExperts& weights_;
  const StripKernels& kernels_;
  const TokenRows& hidden_;
  void* const out_;
  const int experts_, width_, size_, threads_;
  const bool whole_;                     // whether a task is a whole expert
  const int gate_strips_, down_strips_;  // of a task
  const int gate_tasks_;                 // of an expert
  const size_t x_bytes_, h_bytes_;       // of prepared rows
  size_t wide_, narrow_;                 // bytes of rows of hidden states and of h
  char *x_, *placed_h_, *converted_, *h_;
  float* outputs_;  // of whole experts, weighted, [rows, hidden]
  std::optional<FewLora> lora_;
  std::vector<std::atomic<int>> left_;  // tasks of gate and up, by expert
  std::atomic<int> placed_{0};          // tokens
  std::atomic<int> finished_{0};        // experts whose h is ready for down
  std::atomic<int> bad_{-1};            // a token with NaN or Inf
};

}  // namespace

bool runs_few_rows(const Call& call) {
  const Routes& routes = call.routes;
  const StripKernels& kernels = strip_kernels(call.runtime.isa, call.weights.format());
  if (call.lora || call.int8 || call.weights.nodes() > 1 || call.runtime.pool.nodes() > 1) return false;
  const int experts = int(routes.experts.size()), most = kernels.most(call.activation_bits);
  if (!experts || routes.tokens > kMostTokens || routes.rows > most * experts) return false;
  return std::all_of(routes.experts.begin(), routes.experts.end(),
                     [&](const RowChunk& expert) { return expert.rows <= 2 * most; });
}

void forward_few_rows(Call& call, const TokenRows& hidden, void* out) {
  Runtime& rt = call.runtime;
  if (!rt.workspace) rt.workspace = std::make_shared<Workspace>(rt.pool.nodes(), rt.pool.threads());
  FewRows(call, hidden, out).run();
  int64_t tiles = 0;
  const int expert = call.routes.experts[0].expert;
  for (const Projection p : {Projection::kGate, Projection::kUp, Projection::kDown})
    if (call.weights.shape().rows(p)) {
      const PackedMatrix matrix = call.weights.matrix(0, expert, p);
      tiles += int64_t(matrix.rows / kTileRows) * matrix.col_tiles();
    }
  rt.weight_bytes.fetch_add(tiles * info(call.weights.format()).tile_bytes * int64_t(call.routes.experts.size()),
                            std::memory_order_relaxed);
}

}  // namespace ktft
