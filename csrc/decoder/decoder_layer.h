// A decoder layer in a decode step: norms before attention and before the experts, and both of these.
#pragma once

#include "attention/block.h"
#include "decoder/moe_block.h"
#include "dense/norm.h"

namespace ktft {

struct DecoderLayer {
  Norm attention_norm;
  AttentionBlock attention;
  Norm experts_norm;
  MoeBlock experts;

  // From x [requests, hidden] and the residual [requests, hidden] that it is added to, to y [requests, hidden] and the
  // residual that y is to be added to. A null residual is zero; `x` then becomes the residual. Returns the seconds that
  // the experts took. Throws as the blocks do.
  double run(Runtime& runtime, const KvCache& cache, const DecodeStep& step, bf16* x, bf16* residual, bf16* y) const;
};

}  // namespace ktft
