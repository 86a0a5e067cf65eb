#include "quant/codes.h"

#include <iterator>

#include "quant/with_codec.h"

namespace ktft {

Format format_from_name(const std::string& name) {
  return Format(index_of(name, "expert format", kFormats, [](int i) { return kFormatInfo[i].name; }));
}

CodeTable code_table(Format format) {
  return with_codec(format, []<class Codec>() {
    CodeTable table{.codes = Codec::kCodes};
    if constexpr (requires { Codec::kTable; }) {
      table.group_scales = Codec::kScaleKind;
      table.values.assign(std::begin(Codec::kTable), std::end(Codec::kTable));
      table.unit = Codec::kUnit;
      using Scale = typename Codec::Scale;
      if constexpr (sizeof(Scale) == 1)
        for (int s = 0; s < 256; s++) table.multipliers.push_back(Codec::template multiplier<void>(Scale(s)));
    }
    return table;
  });
}

}  // namespace ktft
