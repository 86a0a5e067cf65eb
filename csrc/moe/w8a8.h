// W8A8: forward with activations quantized to int8, token by token, so that the int8 weights need no decoding. x is
// quantized while it is gathered, h between gate/up and down, each NUMA node's columns of it with scales of their own.
// LoRA stays in bf16.
#pragma once

#include "moe/forward.h"

namespace ktft {

// Throws when the layer or the ISA cannot do it.
void check_w8a8(const char* name, Isa isa, const PackedExperts& weights);

static inline size_t int8_bytes(int rows, int cols) { return size_t(rows / kTileRows * int8_strip_bytes(cols)); }
Int8Rows place_int8(Growing& codes, Growing& scales, int rows, int cols, int node);

// One chunk's rows as the forward GEMM takes them -> its rows of `out`.
void quantize(const Call& call, const bf16* rows, int cols, const RowChunk& chunk, const Int8Rows& out);
void quantize_h(const Call& call, const Activations& act, int node, const RowChunk& chunk);

// What run_gemm does for these terms, but of int8 x instead of the terms'.
void int8_product(const Call& call, const GemmArgs& args, const Int8Rows& x, Scratch& scratch);

}  // namespace ktft
