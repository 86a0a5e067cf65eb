#include "isa/avx512_bf16.h"

#include "kernels/instantiate-inl.h"

namespace ktft {

#define KTFT_FORMAT(name, Codec, ...)                                                       \
  {Isa::kAvx512Bf16, Codec::kFormat, Pass::kForward, "avx512_bf16_" #name "_forward",       \
   &gemm_forward<Avx512Bf16, Codec>},                                                       \
      {Isa::kAvx512Bf16, Codec::kFormat, Pass::kBackward, "avx512_bf16_" #name "_backward", \
       &gemm_backward<Avx512Bf16, Codec>},

extern const IsaTable kAvx512Bf16Table;
const IsaTable kAvx512Bf16Table = {{
#include "quant/formats.inc"
                                   },
                                   vector_table<Avx512Bf16>(),
                                   rate_table<Avx512Bf16>()};

}  // namespace ktft
