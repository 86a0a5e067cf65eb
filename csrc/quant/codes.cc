#include "quant/codes.h"

#include <iterator>

#include "quant/with_codec.h"

namespace ktft {
namespace {

template <class Policy>
CodeTable table_of(const NibbleCodec<Policy>&) {
  using Scale = typename Policy::Scale;
  CodeTable table{NibbleCodec<Policy>::kCodes, Policy::kScaleKind};
  table.values.assign(std::begin(Policy::kTable), std::end(Policy::kTable));
  table.unit = Policy::kUnit;
  if constexpr (sizeof(Scale) == 1)
    for (int s = 0; s < 256; s++) table.multipliers.push_back(Policy::template multiplier<void>(Scale(s)));
  return table;
}

template <class Codec>
CodeTable table_of(const Codec&) {
  return {Codec::kCodes};
}

}  // namespace

CodeTable code_table(Format format) {
  return with_codec(format, []<class Codec>() { return table_of(Codec{}); });
}

}  // namespace ktft
