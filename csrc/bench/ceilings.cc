#include "bench/ceilings.h"

#include <emmintrin.h>

#include <atomic>
#include <chrono>
#include <cstring>

namespace ktft {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kChunk = size_t(4) << 20;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Two 16-byte loads in a cycle are faster than any core's share of the memory bandwidth, so no ISA needs its own loop.
void read_lines(char* at, size_t bytes) {
  __m128i sums[4] = {};
  for (size_t i = 0; i < bytes; i += 64)
    for (int k = 0; k < 4; k++)
      sums[k] = _mm_xor_si128(sums[k], _mm_load_si128(reinterpret_cast<const __m128i*>(at + i) + k));
  for (__m128i& sum : sums) __asm__ volatile("" ::"x"(sum));
}

// Inverts the bits of three lines out of four.
void update_lines(char* at, size_t bytes) {
  const __m128i ones = _mm_set1_epi8(-1);
  for (size_t i = 0; i < bytes; i += 256) {
    read_lines(at + i, 64);
    for (size_t k = 64; k < 256; k += 16) {
      __m128i* const word = reinterpret_cast<__m128i*>(at + i + k);
      _mm_store_si128(word, _mm_xor_si128(_mm_load_si128(word), ones));
    }
  }
}

}  // namespace

double measure_flops(Runtime& runtime, Ceiling ceiling, double seconds) {
  const ForkLock lock(runtime.mutex);
  const RateKernels& kernels = rate_kernels(runtime.isa);
  std::atomic<int64_t> flops{0};
  const auto start = Clock::now();
  runtime.pool.run(runtime.pool.threads(), [&](int, int thread) {
    Scratch& scratch = runtime.scratch[thread];
    scratch.reserve(kRateMemory);
    scratch.reset();
    char* const memory = scratch.take<char>(kRateMemory);
    kernels.fill(memory);
    int64_t mine = 0;
    do mine += ceiling == Ceiling::kHot ? kernels.hot(memory) : kernels.registers(memory);
    while (since(start) < seconds);
    flops += mine;
  });
  return double(flops) / since(start);
}

StreamedMemory::StreamedMemory(std::shared_ptr<Runtime> runtime, size_t bytes) : runtime_(std::move(runtime)) {
  const ForkLock lock(runtime_->mutex);
  const int nodes = runtime_->pool.nodes();
  for (int n = 0; n < nodes; n++) {
    chunks_.push_back(int((bytes / size_t(nodes) + kChunk - 1) / kChunk));
    memory_.emplace_back(size_t(chunks_[n]) * kChunk, runtime_->node_ids[n]);
  }
  const RateKernels& kernels = rate_kernels(runtime_->isa);
  static_assert(kChunk % kRateMemory == 0);
  runtime_->pool.run(chunks_, [&](int node, int task, int) {
    for (size_t at = 0; at < kChunk; at += kRateMemory) kernels.fill(memory_[node].data() + task * kChunk + at);
  });
}

double StreamedMemory::gemm(int tokens, int reduction) {
  KTFT_CHECK(tokens > 0 && tokens <= kMaxTokens && reduction > 0 && reduction % kDimMultiple == 0, "tokens are ",
             tokens, ", the reduction is ", reduction, "; they must be 1 to ", kMaxTokens, " and a multiple of ",
             kDimMultiple);
  const ForkLock lock(runtime_->mutex);
  const RateKernels& kernels = rate_kernels(runtime_->isa);
  const size_t x_bytes = activation_elements(pad_rows(tokens), reduction) * sizeof(bf16);
  const size_t filled = (x_bytes + kRateMemory - 1) / kRateMemory * kRateMemory;
  const size_t results = size_t(pad_rows(tokens)) * kMaxOutputs * sizeof(float);
  runtime_->pool.run(int(runtime_->scratch.size()), [&](int task, int) {
    Scratch& scratch = runtime_->scratch[task];
    scratch.reserve(filled + results + kGemmScratch + 4096);
    scratch.reset();
    char* const x = scratch.take<char>(filled);
    for (size_t at = 0; at < filled; at += kRateMemory) kernels.fill(x + at);
  });
  const int64_t strip_bytes = weight_strip_bytes(Format::kBf16, reduction);
  const int64_t call_bytes = kMaxOutputs / kTileRows * strip_bytes;
  std::vector<int> calls;
  int64_t count = 0;
  for (const NodeBuffer& memory : memory_) {
    calls.push_back(int(memory.size() / size_t(call_bytes)));
    count += calls.back();
  }
  KTFT_CHECK(count > 0, "the memory holds no ", kMaxOutputs, " rows of ", reduction, " weights");
  const Gemm gemm = find_gemm(runtime_->isa, Format::kBf16, Pass::kForward);
  const auto start = Clock::now();
  runtime_->pool.run(calls, [&](int node, int task, int thread) {
    Scratch& scratch = runtime_->scratch[thread];
    scratch.reset();
    const bf16* const rows = reinterpret_cast<const bf16*>(scratch.take<char>(filled));
    float* const c = scratch.take<float>(results / sizeof(float));
    bf16* const weights = reinterpret_cast<bf16*>(memory_[node].data() + task * call_bytes);
    const PackedMatrix w = bf16_matrix(weights, kMaxOutputs, reduction, strip_bytes / int64_t(sizeof(bf16)));
    gemm({.terms = {{.w = &w, .x = rows, .c = c}},
          .out_count = kMaxOutputs,
          .tokens = tokens,
          .scratch = scratch.take<char>(kGemmScratch)});
  });
  return double(count) * 2 * kMaxOutputs * tokens * reduction / since(start);
}

double StreamedMemory::read() { return stream(&read_lines); }

double StreamedMemory::update() { return stream(&update_lines) * 7 / 4; }

double StreamedMemory::stream(void (*each)(char* at, size_t bytes)) {
  const ForkLock lock(runtime_->mutex);
  size_t bytes = 0;
  for (const NodeBuffer& memory : memory_) bytes += memory.size();
  const auto start = Clock::now();
  runtime_->pool.run(chunks_, [&](int node, int task, int) { each(memory_[node].data() + task * kChunk, kChunk); });
  return double(bytes) / since(start);
}

}  // namespace ktft
