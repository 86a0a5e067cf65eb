#include "attention/heads.h"

#include <cstring>

#include "base/check.h"

namespace ktft {

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
    const int64_t block = tokens.slots[t] / block_size, place = tokens.slots[t] % block_size;
    for (int h = 0; h < kv_heads; h++) {
      bf16* const at = cache.keys + block * cache.block_stride + h * cache.head_stride;
      for (int d = 0; d < head_size; d++) at[int64_t(d) * block_size + place] = keys[h * head_size + d];
      std::memcpy(at + (block_size + place) * head_size, values + h * head_size, size_t(head_size) * sizeof(bf16));
    }
  };
  if (tokens.count == 1)
    one(0, 0);
  else
    runtime.pool.run(tokens.count, one);
}

}  // namespace ktft
