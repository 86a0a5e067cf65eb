#include "quant/format.h"

#include "base/check.h"

namespace ktft {

Format format_from_name(const std::string& name) {
  std::string known;
  for (int i = 0; i < kFormats; i++) {
    if (name == kFormatInfo[i].name) return Format(i);
    known += std::string(i ? ", " : "") + kFormatInfo[i].name;
  }
  fail("unknown expert format '", name, "'; ktft has: ", known);
}

}  // namespace ktft
