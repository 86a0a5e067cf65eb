#include "isa/amx_emu.h"

#include "kernels/instantiate-inl.h"

constinit const ktft::IsaTable ktft::kAmxEmuTable = isa_table<AmxEmu>();
