#include "isa/amx.h"
#include "kernels/instantiate-inl.h"

constinit const ktft::IsaTable ktft::kAmxBf16Table = isa_table<AmxBf16>();
