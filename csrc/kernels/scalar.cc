#include "isa/scalar.h"

#include "kernels/instantiate-inl.h"

constinit const ktft::IsaTable ktft::kScalarTable = isa_table<Scalar>();
