#include "isa/avx512_bf16.h"

#include "kernels/instantiate-inl.h"

constinit const ktft::IsaTable ktft::kAvx512Bf16Table = isa_table<Avx512Bf16>();
