// KTFT_INSTANTIATE(isa enum, ISA struct, name) defines the table of one ISA from formats.inc.
#pragma once

#include "kernels/gemm-inl.h"
#include "kernels/tile_gemm-inl.h"
#include "kernels/vector-inl.h"

namespace ktft {

struct IsaTable {
  GemmKernel gemms[kFormats * kPasses];
  VectorKernels vectors;
};

template <class V>
constexpr auto token_packer() -> void (*)(int, int, const bf16*, int64_t, bf16*) {
  if constexpr (requires { typename V::Tiles; })
    return &pack_tokens<V>;
  else
    return nullptr;
}

template <class V>
constexpr VectorKernels vector_table() {
  return {&gemm_nt<V>, &gemm_nn<V>,       &silu_mul<V>,      &silu_mul_backward<V>, &widen<V>,
          &narrow<V>,  &narrow_scaled<V>, token_packer<V>(), &add_scaled<V>,        &dropout<V>};
}

}  // namespace ktft
