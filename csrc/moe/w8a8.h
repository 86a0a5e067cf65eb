// W8A8: a forward with activations quantized to int8, token by token, so that int8 weights need no decoding. x is
// quantized as it is gathered, h before down, with scales of its own for each node's columns. LoRA stays in bf16.
#pragma once

#include "moe/activations.h"

namespace ktft {

// Throws if the layer or the ISA does not support it.
void check_w8a8(const char* name, Isa isa, const PackedExperts& weights);

// Quantizes one chunk's rows, which are in the forward GEMM's layout, into the chunk's rows of `out`.
void quantize(const Call& call, const bf16* rows, int cols, const RowChunk& chunk, const Int8Rows& out);
void quantize_h(const Call& call, const Activations& act, int node, const RowChunk& chunk);

// Does what run_gemm does for these terms, with int8 x in place of theirs.
void int8_product(const Call& call, const GemmArgs& args, const Int8Rows& x, Scratch& scratch);

}  // namespace ktft
