#include "kernels/instantiate-inl.h"

namespace ktft {
namespace {

const IsaTable& table_of(Isa isa) {
  constexpr const IsaTable* kTables[kIsas] = {&kAmxEmuTable, &kScalarTable,     &kAvx2Table,
                                              &kAvx512Table, &kAvx512Bf16Table, &kAmxBf16Table};
  return *kTables[int(isa)];
}

}  // namespace

Gemm find_gemm(Isa isa, Format format, Pass pass) { return table_of(isa).gemms[int(format)][int(pass)]; }

const StripKernels& strip_kernels(Isa isa, Format format) { return table_of(isa).strips[int(format)]; }

const VectorKernels& vector_kernels(Isa isa) { return table_of(isa).vectors; }

const Int8Kernels* int8_kernels(Isa isa) {
  const Int8Kernels& kernels = table_of(isa).int8;
  return kernels.gemm ? &kernels : nullptr;
}

const RateKernels& rate_kernels(Isa isa) { return table_of(isa).rates; }

Attention find_attention(Isa isa) { return table_of(isa).attention; }

PrepareHeads find_prepare_heads(Isa isa) { return table_of(isa).prepare_heads; }

size_t attention_scratch(int heads, int head_size) {
  return sizeof(float) * (size_t(heads) * (kScoreRow + head_size) + ceil_div(heads, 16) * 16);
}

}  // namespace ktft
