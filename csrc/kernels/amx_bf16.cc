#include "isa/amx.h"
#include "kernels/instantiate-inl.h"

namespace ktft {

#define KTFT_FORMAT(name, Codec, ...)                                                                                \
  {Isa::kAmxBf16, Codec::kFormat, Pass::kForward, "amx_bf16_" #name "_forward", &tile_gemm_forward<AmxBf16, Codec>}, \
      {Isa::kAmxBf16, Codec::kFormat, Pass::kBackward, "amx_bf16_" #name "_backward",                                \
       &tile_gemm_backward<AmxBf16, Codec>},

extern const IsaTable kAmxBf16Table;
const IsaTable kAmxBf16Table = {{
#include "quant/formats.inc"
                                },
                                vector_table<AmxBf16>(),
                                rate_table<AmxBf16>(),
                                int8_table<AmxBf16>()};

}  // namespace ktft
