#include "isa/amx_emu.h"

#include "kernels/instantiate-inl.h"

namespace ktft {

#define KTFT_FORMAT(name, Codec, ...)                                                                             \
  {Isa::kAmxEmu, Codec::kFormat, Pass::kForward, "amx_emu_" #name "_forward", &tile_gemm_forward<AmxEmu, Codec>}, \
      {Isa::kAmxEmu, Codec::kFormat, Pass::kBackward, "amx_emu_" #name "_backward",                               \
       &tile_gemm_backward<AmxEmu, Codec>},

extern const IsaTable kAmxEmuTable;
const IsaTable kAmxEmuTable = {{
#include "quant/formats.inc"
                               },
                               vector_table<AmxEmu>(),
                               rate_table<AmxEmu>(),
                               int8_table<AmxEmu>()};

}  // namespace ktft
