// KTFT_INSTANTIATE(isa enum, ISA struct, name) defines the table of one ISA from quant/formats.inc.
#pragma once

#include "kernels/adam-inl.h"
#include "kernels/epilogue-inl.h"
#include "kernels/gemm-inl.h"
#include "kernels/int8_gemm-inl.h"
#include "kernels/rates-inl.h"
#include "kernels/tile_gemm-inl.h"
#include "kernels/vector-inl.h"

namespace ktft {

struct IsaTable {
  GemmKernel gemms[kFormats * kPasses];
  VectorKernels vectors;
  RateKernels rates;
  Int8Kernels int8{};
};

template <class V>
constexpr VectorKernels vector_table() {
  auto* pack_forward = &pack_rows<V>;
  if constexpr (kHasTiles<V>) pack_forward = &pack_turned<V>;
  return {kHasTiles<V>,   &pack_rows<V>,    pack_forward,     &unturn<V>,      &swiglu<V>,    &swiglu_backward<V>,
          &store_rows<V>, &finite<V>,       &widen<V>,        &narrow<V>,      &scale_row<V>, &split<V>,
          &dot<V>,        &weighted_sum<V>, &dropout_mask<V>, &adam<V, float>, &adam<V, bf16>};
}

}  // namespace ktft
