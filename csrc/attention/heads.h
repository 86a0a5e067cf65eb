// What lies between the product of queries, keys and values and attention over them: norms of the heads, rotary
// embedding, and the way of keys and values into a paged KV cache.
#pragma once

#include "runtime/runtime.h"

namespace ktft {

// A layer's keys and values, in blocks. Strides count elements. A head's part of a block is keys [head_size,
// block_size], then values [block_size, head_size]; or, in pairs, keys [block_size / 16, head_size / 2, 16, 2], tokens
// before columns, then values [head_size / 16, block_size / 2, 16, 2], columns before tokens.
struct KvCache {
  bf16* keys;  // of the first head in the first block
  int64_t block_stride, head_stride;
  int blocks;
  bool pairs;
};

// Tokens of any requests.
struct NewTokens {
  int count;
  bf16* qkv;                 // [count, heads + 2 kv_heads, head_size]: queries, keys, values
  const int64_t* positions;  // [count]
  const int64_t* slots;      // [count]: block * block_size + place in it; negative for a token that is not kept
};

struct Heads {
  int heads, kv_heads, head_size, block_size;
  const bf16 *query_norm, *key_norm;  // [head_size]: weights of the norms; or both null
  float epsilon;
  const bf16* turns;  // [positions, rotary]: cosines, then sines, for halves of a head (GPT-NeoX); or null
  int rotary, positions;

  // Queries and keys are computed in place; keys and values are copied to the cache. Throws if a position or a slot
  // does not exist.
  void write(Runtime& runtime, const NewTokens& tokens, const KvCache& cache) const;
};

}  // namespace ktft
