#include "attention/decode.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace ktft {
namespace {

constexpr int kLeastPart = 256;  // tokens of context that are worth a task of their own
constexpr int kPerThread = 2;

void check_contexts(const DecodeTokens& in, int block_size, int blocks) {
  for (int r = 0; r < in.requests; r++) {
    const int length = in.lengths[r], count = ceil_div(length, block_size);
    KTFT_CHECK(length > 0 && count <= in.table_blocks, "request ", r, " has a context of ", length,
               " tokens, while its row of the block table is for 1 to ", in.table_blocks * block_size);
    for (int i = 0; i < count; i++) {
      const int block = in.block_table[r * in.table_stride + i];
      KTFT_CHECK(block >= 0 && block < blocks, "request ", r, " has block ", block, " of a KV cache of ", blocks);
    }
  }
}

// What `parts` tasks found for one head: `apart` elements lie from one part to the next.
struct HeadParts {
  int parts;
  int64_t apart;
  const float *values, *largest, *total;
};

// The head's output, [head_size].
void merge(const HeadParts& in, int size, const float* sink, float* out) {
  float most = sink ? *sink : -INFINITY;
  for (int p = 0; p < in.parts; p++) most = std::max(most, in.largest[p * in.apart]);
  float total = sink ? std::exp(*sink - most) : 0;
  std::fill_n(out, size, 0.f);
  for (int p = 0; p < in.parts; p++) {
    const float factor = std::exp(in.largest[p * in.apart] - most);
    total += factor * in.total[p * in.apart];
    for (int d = 0; d < size; d++) out[d] += factor * in.values[p * in.apart + d];
  }
  for (int d = 0; d < size; d++) out[d] /= total;
}

}  // namespace

void DecodeAttention::run(Runtime& runtime, const KvCache& cache, const DecodeTokens& in, bf16* out) const {
  check_contexts(in, block_size, cache.blocks);
  const ForkLock lock(runtime.mutex);
  const Attention attention = find_attention(runtime.isa);
  const VectorKernels& vec = runtime.vec();
  const int group = heads / kv_heads, tasks = in.requests * kv_heads;
  const auto first_of = [&](int r) { return window ? std::max(0, in.lengths[r] - window) : 0; };
  int longest = 0;
  for (int r = 0; r < in.requests; r++) longest = std::max(longest, in.lengths[r] - first_of(r));
  const int parts = std::clamp(longest / kLeastPart, 1, ceil_div(kPerThread * runtime.pool.threads(), tasks));
  for (Scratch& scratch : runtime.scratch)
    scratch.reserve(attention_scratch(group, head_size) + in_lines(head_size * sizeof(float)));
  const int64_t apart = int64_t(group) * (head_size + 2);  // values, then the largest scores and the totals
  float* const results = runtime.attention_parts.get<float>(tasks * parts * apart * sizeof(float));

  const auto finish = [&](int task, int thread) {
    Scratch& scratch = runtime.scratch[thread];
    scratch.reset();
    float* const sums = scratch.take<float>(head_size);
    const float *values = results + task * parts * apart, *largest = values + group * head_size;
    for (int h = 0; h < group; h++) {
      const int64_t head = int64_t(task) * group + h;
      merge({parts, apart, values + h * head_size, largest + h, largest + group + h}, head_size,
            sinks ? sinks + head % heads : nullptr, sums);
      vec.narrow(head_size, sums, out + head * head_size);
    }
  };
  runtime.pool.run(tasks * parts, [&](int index, int thread) {
    const int task = index / parts, part = index % parts, r = task / kv_heads, first = first_of(r);
    const int tokens = in.lengths[r] - first;
    const int begin = first + split(tokens, parts, part), end = first + split(tokens, parts, part + 1);
    float *const values = results + index * apart, *const largest = values + group * head_size;
    Scratch& scratch = runtime.scratch[thread];
    scratch.reset();
    attention({.heads = group,
               .head_size = head_size,
               .block_size = block_size,
               .query = in.query + r * in.query_stride + task % kv_heads * group * head_size,
               .scale = scale,
               .cache = cache.keys + task % kv_heads * cache.head_stride,
               .pairs = cache.pairs,
               .block_stride = cache.block_stride,
               .blocks = in.block_table + r * in.table_stride,
               .begin = begin,
               .end = end,
               .scratch = scratch.take<char>(attention_scratch(group, head_size)),
               .values = values,
               .largest = largest,
               .total = largest + group});
    if (parts == 1) finish(task, thread);
  });
  if (parts > 1) runtime.pool.run(tasks, finish);
}

}  // namespace ktft
