#include "base/check.h"
#include "base/cpu.h"
#include "kernels/instantiate-inl.h"

namespace ktft {

extern const IsaTable kAmxEmuTable, kScalarTable, kAvx2Table, kAvx512Table, kAvx512Bf16Table, kAmxBf16Table;

namespace {
const IsaTable* const kTables[kIsas] = {&kAmxEmuTable, &kScalarTable,     &kAvx2Table,
                                        &kAvx512Table, &kAvx512Bf16Table, &kAmxBf16Table};
}  // namespace

const std::vector<GemmKernel>& gemm_table() {
  static const std::vector<GemmKernel> all = [] {
    std::vector<GemmKernel> v;
    for (const IsaTable* table : kTables) v.insert(v.end(), std::begin(table->gemms), std::end(table->gemms));
    return v;
  }();
  return all;
}

const GemmKernel& find_gemm(Isa isa, Format format, Pass pass) {
  for (const GemmKernel& kernel : gemm_table())
    if (kernel.isa == isa && kernel.format == format && kernel.pass == pass) return kernel;
  fail("no ", isa_name(isa), " kernel for format ", info(format).name);
}

const VectorKernels& vector_kernels(Isa isa) { return kTables[int(isa)]->vectors; }

const Int8Kernels* int8_kernels(Isa isa) {
  const Int8Kernels& kernels = kTables[int(isa)]->int8;
  return kernels.gemm ? &kernels : nullptr;
}

const RateKernels& rate_kernels(Isa isa) { return kTables[int(isa)]->rates; }

}  // namespace ktft
