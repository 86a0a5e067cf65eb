// What this CPU can run: the only place of CPU detection and of reading KTFT_ISA.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/types.h"

namespace ktft {

struct CpuFeatures {
  bool avx2, fma, f16c, avx512, avx512_bf16, avx512_vnni, avx512_vbmi, amx_tile, amx_bf16, amx_int8;
};

const CpuFeatures& cpu_features();
std::vector<std::pair<std::string, bool>> cpu_feature_list();

const char* isa_name(Isa isa);
Isa isa_from_name(const std::string& name);  // throws, listing the names

void require_isa(Isa isa);          // throws when this CPU cannot run it
std::vector<Isa> supported_isas();  // slowest first
Isa default_isa();  // the one that KTFT_ISA names, or else the fastest; throws when the named one cannot run here

}  // namespace ktft
