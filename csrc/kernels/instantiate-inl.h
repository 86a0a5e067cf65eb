// The kernel table of one ISA. An ISA's own file makes it, compiled with the ISA's flags.
#pragma once

#include "kernels/adam-inl.h"
#include "kernels/attention-inl.h"
#include "kernels/epilogue-inl.h"
#include "kernels/gemm-inl.h"
#include "kernels/heads-inl.h"
#include "kernels/int8_gemm-inl.h"
#include "kernels/rates-inl.h"
#include "kernels/strips-inl.h"
#include "kernels/tile_gemm-inl.h"
#include "kernels/vector-inl.h"

namespace ktft {

struct IsaTable {
  Gemm gemms[kFormats][kPasses];
  StripKernels strips[kFormats];
  VectorKernels vectors;
  RateKernels rates;
  Int8Kernels int8;
  Attention attention;
  PrepareHeads prepare_heads;
};
extern const IsaTable kAmxEmuTable, kScalarTable, kAvx2Table, kAvx512Table, kAvx512Bf16Table, kAmxBf16Table;

template <class V, class Codec>
consteval void add_format(IsaTable& table) {
  table.strips[int(Codec::kFormat)] = {
      kMostDotTokens<V, Codec>,   kMostByteTokens<V, Codec>,  kDotsBytes<V, Codec> || kHasByteGemm<V, Codec>,
      &strip_row_bytes<V, Codec>, &place_strip_row<V, Codec>, &strip_product<V, Codec>};
  auto& [forward, backward] = table.gemms[int(Codec::kFormat)];
  if constexpr (kHasTiles<V>) {
    forward = &tile_gemm_forward<V, Codec>;
    backward = &tile_gemm_backward<V, Codec>;
  } else {
    forward = &gemm_forward<V, Codec>;
    backward = &gemm_backward<V, Codec>;
  }
}

template <class V>
consteval IsaTable isa_table() {
  IsaTable table{.gemms = {},
                 .strips = {},
                 .vectors = {kHasTiles<V>,
                             &pack_rows<V>,
                             &pack_rows<V>,
                             &unturn<V>,
                             &swiglu<V>,
                             &swiglu_backward<V>,
                             &swiglu_strip<V>,
                             &store_rows<V>,
                             &finite<V>,
                             &convert<V, bf16, float>,
                             &convert<V, float, bf16>,
                             &scale_row<V>,
                             &split<V>,
                             &dot<V>,
                             &weighted_sum<V>,
                             &dropout_mask<V>,
                             &adam<V, float>,
                             &adam<V, bf16>,
                             &norm_row<V>,
                             &norm_row_backward<V>},
                 .rates = {&fill_rate_memory, nullptr, &hot_rate<V>},
                 .int8 = {},
                 .attention = &attention<V>,
                 .prepare_heads = &prepare_heads<V>};
#define KTFT_FORMAT(name, Codec, ...) add_format<V, Codec>(table);
#include "quant/formats.inc"
#undef KTFT_FORMAT
  if constexpr (kHasTiles<V>) {
    table.vectors.pack_forward = &pack_turned<V>;
    table.int8 = {&quantize_strip<V>, &int8_gemm<V>};
    table.rates.registers = &tile_register_rate<typename V::Tiles>;
  } else {
    table.rates.registers = &vector_register_rate<V>;
  }
  return table;
}

}  // namespace ktft
