#include "isa/avx2.h"

#include "kernels/instantiate-inl.h"

namespace ktft {

#define KTFT_FORMAT(name, Codec, ...)                                                                 \
  {Isa::kAvx2, Codec::kFormat, Pass::kForward, "avx2_" #name "_forward", &gemm_forward<Avx2, Codec>}, \
      {Isa::kAvx2, Codec::kFormat, Pass::kBackward, "avx2_" #name "_backward", &gemm_backward<Avx2, Codec>},

extern const IsaTable kAvx2Table;
const IsaTable kAvx2Table = {{
#include "quant/formats.inc"
                             },
                             vector_table<Avx2>(),
                             rate_table<Avx2>()};

}  // namespace ktft
