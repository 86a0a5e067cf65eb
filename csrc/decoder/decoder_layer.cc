#include "decoder/decoder_layer.h"

namespace ktft {

double DecoderLayer::run(Runtime& runtime, const KvCache& cache, const DecodeStep& step, bf16* x, bf16* residual,
                         bf16* y) const {
  const auto normed = lines_of(int64_t(step.requests) * attention_norm.size);
  const auto spare = lines_of(int64_t(step.requests) * attention.spare_elements());
  bf16* const rows = normed[0].values;
  attention_norm.run(runtime, x, residual, step.requests, rows);
  attention.run(runtime, cache, step, rows, spare[0].values, y);
  experts_norm.run(runtime, y, residual ? residual : x, step.requests, rows);
  return experts.run(runtime, rows, step.requests, y);
}

}  // namespace ktft
