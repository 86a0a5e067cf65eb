#include "isa/scalar.h"

#include "kernels/instantiate-inl.h"

namespace ktft {

#define KTFT_FORMAT(name, Codec, ...)                                                                       \
  {Isa::kScalar, Codec::kFormat, Pass::kForward, "scalar_" #name "_forward", &gemm_forward<Scalar, Codec>}, \
      {Isa::kScalar, Codec::kFormat, Pass::kBackward, "scalar_" #name "_backward", &gemm_backward<Scalar, Codec>},

extern const IsaTable kScalarTable;
const IsaTable kScalarTable = {{
#include "quant/formats.inc"
                               },
                               vector_table<Scalar>(),
                               rate_table<Scalar>()};

}  // namespace ktft
