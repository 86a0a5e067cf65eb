#include "attention/heads.h"

#include "base/check.h"

namespace ktft {
namespace {

// Where column d of the token at `place` in a block is, from the head's first key and its first value on.
struct Place {
  int place, head_size, block_size;
  bool pairs;

  int64_t key(int d) const {
    if (!pairs) return int64_t(d) * block_size + place;
    return int64_t(place / 16 * 16) * head_size + d / 2 * 32 + place % 16 * 2 + d % 2;
  }
  int64_t value(int d) const {
    if (!pairs) return int64_t(place) * head_size + d;
    return int64_t(d / 16 * 16) * block_size + place / 2 * 32 + d % 16 * 2 + place % 2;
  }
};

}  // namespace

void Heads::write(Runtime& runtime, const NewTokens& tokens, const KvCache& cache) const {
  for (int t = 0; t < tokens.count; t++) {
    KTFT_CHECK(!turns || (tokens.positions[t] >= 0 && tokens.positions[t] < positions), "token ", t, " has position ",
               tokens.positions[t], " of a rotary embedding for ", positions);
    KTFT_CHECK(tokens.slots[t] < int64_t(cache.blocks) * block_size, "token ", t, " has slot ", tokens.slots[t],
               " of a KV cache of ", cache.blocks, " blocks of ", block_size);
  }
  const ForkLock lock(runtime.mutex);
  const PrepareHeads prepare = find_prepare_heads(runtime.isa);
  const auto one = [&](int t, int) {
    bf16* const queries = tokens.qkv + int64_t(t) * (heads + 2 * kv_heads) * head_size;
    bf16 *const keys = queries + heads * head_size, *const values = keys + kv_heads * head_size;
    const bf16* const turn = turns ? turns + tokens.positions[t] * rotary : nullptr;
    prepare({heads, head_size, queries, query_norm, epsilon, turn, rotary});
    prepare({kv_heads, head_size, keys, key_norm, epsilon, turn, rotary});
    if (tokens.slots[t] < 0) return;
    const Place place{int(tokens.slots[t] % block_size), head_size, block_size, cache.pairs};
    for (int h = 0; h < kv_heads; h++) {
      bf16* const to = cache.keys + tokens.slots[t] / block_size * cache.block_stride + h * cache.head_stride;
      bf16* const value = to + int64_t(block_size) * head_size;
      for (int d = 0; d < head_size; d++) {
        to[place.key(d)] = keys[h * head_size + d];
        value[place.value(d)] = values[h * head_size + d];
      }
    }
  };
  if (tokens.count == 1)
    one(0, 0);
  else
    runtime.pool.run(tokens.count, one);
}

}  // namespace ktft
