#include "isa/avx2.h"

#include "kernels/instantiate-inl.h"

constinit const ktft::IsaTable ktft::kAvx2Table = isa_table<Avx2>();
