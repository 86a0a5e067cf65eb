// An attention block in a decode step: the products before and after attention, and all between them.
#pragma once

#include "attention/decode.h"
#include "dense/weight.h"

namespace ktft {

// The requests of a step, each with one token; see DecodeTokens and NewTokens.
struct DecodeStep {
  int requests;
  const int64_t *positions, *slots;
  const int32_t* block_table;
  int64_t table_blocks, table_stride;
  const int32_t* lengths;
};

struct AttentionBlock {
  DenseWeight qkv;
  Heads heads;
  DecodeAttention attention;
  DenseWeight out;

  // y [requests, hidden] from x [requests, hidden]. `spare` is for qkv's and attention's results, spare_elements of
  // them for each request. Throws as Heads::write and DecodeAttention::run do.
  void run(Runtime& runtime, const KvCache& cache, const DecodeStep& step, const bf16* x, bf16* spare, bf16* y) const;
  int spare_elements() const { return qkv.rows + out.cols; }
};

}  // namespace ktft
