#include "isa/avx512.h"

#include "kernels/instantiate-inl.h"

namespace ktft {

#define KTFT_FORMAT(name, Codec, ...)                                                                       \
  {Isa::kAvx512, Codec::kFormat, Pass::kForward, "avx512_" #name "_forward", &gemm_forward<Avx512, Codec>}, \
      {Isa::kAvx512, Codec::kFormat, Pass::kBackward, "avx512_" #name "_backward", &gemm_backward<Avx512, Codec>},

extern const IsaTable kAvx512Table;
const IsaTable kAvx512Table = {{
#include "quant/formats.inc"
                               },
                               vector_table<Avx512>(),
                               rate_table<Avx512>()};

}  // namespace ktft
