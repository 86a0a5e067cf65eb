// Attention of a decode step: one token a request, over the keys and values of its context in a paged KV cache.
#pragma once

#include "attention/heads.h"

namespace ktft {

// The requests of a step, each with one token.
struct DecodeTokens {
  int requests;
  const bf16* query;  // [requests, heads, head_size], query_stride elements from request to request
  int64_t query_stride;
  const int32_t* block_table;  // [requests, table_blocks]: the blocks of each context
  int64_t table_blocks, table_stride;
  const int32_t* lengths;  // of each context, with the token itself
};

struct DecodeAttention {
  int heads, kv_heads, head_size, block_size;
  float scale;
  int window;          // the tokens of the context that count, its last ones; 0 stands for all
  const float* sinks;  // [heads]: a score of each head that has no value; or null

  // `out` is [requests, heads, head_size]. Throws if a context is longer than its row of the table, or names a block
  // that the cache does not have.
  void run(Runtime& runtime, const KvCache& cache, const DecodeTokens& tokens, bf16* out) const;
};

}  // namespace ktft
