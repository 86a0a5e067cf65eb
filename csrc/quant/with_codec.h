// From a format that is known at run time to its codec. Not for kernels: `fail` must be compiled for plain x86-64.
#pragma once

#include "base/check.h"
#include "quant/codecs.h"

namespace ktft {

// Calls f.template operator()<Codec>() with the format's codec.
template <class Fn>
auto with_codec(Format format, const Fn& f) {
#define KTFT_FORMAT(name, Codec, ...) \
  if (format == Codec::kFormat) return f.template operator()<Codec>();
#include "quant/formats.inc"
#undef KTFT_FORMAT
  fail("format ", int(format), " has no codec");
}

}  // namespace ktft
