#include "bench/ceilings.h"

#include <emmintrin.h>

#include <chrono>
#include <cstring>

namespace ktft {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kChunk = size_t(4) << 20;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// 16-byte loads, two a cycle, are faster than any core's share of memory: no ISA needs its own loop.
void read(const char* at, size_t bytes) {
  __m128i sums[4] = {};
  for (size_t i = 0; i < bytes; i += 64)
    for (int k = 0; k < 4; k++)
      sums[k] = _mm_xor_si128(sums[k], _mm_load_si128(reinterpret_cast<const __m128i*>(at + i) + k));
  for (__m128i& sum : sums) __asm__ volatile("" ::"x"(sum));
}

}  // namespace

double measure_flops(Runtime& runtime, Ceiling ceiling, double seconds) {
  const std::lock_guard<std::mutex> lock(runtime.mutex);
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

ReadBandwidth::ReadBandwidth(std::shared_ptr<Runtime> runtime, size_t bytes) : runtime_(std::move(runtime)) {
  const std::lock_guard<std::mutex> lock(runtime_->mutex);
  const int nodes = runtime_->pool.nodes();
  for (int n = 0; n < nodes; n++) {
    chunks_.push_back(int((bytes / size_t(nodes) + kChunk - 1) / kChunk));
    memory_.emplace_back(size_t(chunks_[n]) * kChunk, runtime_->node_ids[n]);
  }
  runtime_->pool.run(chunks_,
                     [&](int node, int task, int) { std::memset(memory_[node].data() + task * kChunk, 1, kChunk); });
}

double ReadBandwidth::measure() {
  const std::lock_guard<std::mutex> lock(runtime_->mutex);
  size_t bytes = 0;
  for (int chunks : chunks_) bytes += size_t(chunks) * kChunk;
  const auto start = Clock::now();
  runtime_->pool.run(chunks_, [&](int node, int task, int) { read(memory_[node].data() + task * kChunk, kChunk); });
  return double(bytes) / since(start);
}

}  // namespace ktft
