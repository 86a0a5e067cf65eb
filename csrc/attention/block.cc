#include "attention/block.h"

namespace ktft {

void AttentionBlock::run(Runtime& runtime, const KvCache& cache, const DecodeStep& step, const bf16* x, bf16* spare,
                         bf16* y) const {
  bf16 *const rows = spare, *const found = spare + int64_t(step.requests) * qkv.rows;
  qkv.product(runtime, x, step.requests, true, rows);
  heads.write(runtime, {step.requests, rows, step.positions, step.slots}, cache);
  attention.run(runtime, cache,
                {step.requests, rows, qkv.rows, step.block_table, step.table_blocks, step.table_stride, step.lengths},
                found);
  out.product(runtime, found, step.requests, true, y);
}

}  // namespace ktft
