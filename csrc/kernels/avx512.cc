#include "isa/avx512.h"

#include "kernels/instantiate-inl.h"

constinit const ktft::IsaTable ktft::kAvx512Table = isa_table<Avx512>();
