// What this CPU can run. CPU detection is here and nowhere else, and so is reading KTFT_ISA.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/types.h"

namespace ktft {

struct CpuFeatures {
  bool avx2, fma, f16c, avx512, avx512_bf16, avx512_vnni, avx512_vbmi, amx_tile, amx_bf16, amx_int8;
};

// AMX counts as usable only if the operating system grants its tile state (arch_prctl, Linux 5.16).
const CpuFeatures& cpu_features();
std::vector<std::pair<std::string, bool>> cpu_feature_list();

const char* isa_name(Isa isa);
Isa isa_from_name(const std::string& name);  // throws, listing the names

// Throws when this process cannot run the ISA. For AMX, this is the call that requests the tile state.
void require_isa(Isa isa);

// ISAs this CPU runs, slowest first.
std::vector<Isa> supported_isas();

// The ISA that KTFT_ISA names, or else the fastest supported one. Throws when the named one is unknown or cannot run
// here.
Isa default_isa();

}  // namespace ktft
