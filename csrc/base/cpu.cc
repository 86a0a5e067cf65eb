#include "base/cpu.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>

#include "base/check.h"

namespace ktft {
namespace {

constexpr const char* kIsaNames[kIsas] = {"amx_emu", "scalar", "avx2", "avx512", "avx512_bf16", "amx_bf16"};

uint64_t enabled_state() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

// AMX can be used only if the operating system grants its tile state (arch_prctl, Linux 5.16).
bool request_amx_tiles() {
  constexpr long kArchReqXcompPerm = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}

CpuFeatures detect() {
  CpuFeatures f{};
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return f;
  const uint64_t state = enabled_state();
  const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6, tiles = (state & 0x60000) == 0x60000;
  f.fma = ymm && (c >> 12 & 1);
  f.f16c = ymm && (c >> 29 & 1);
  uint32_t a7, b7, c7, d7;
  if (!__get_cpuid_count(7, 0, &a7, &b7, &c7, &d7)) return f;
  const auto bit = [](uint32_t word, int i) { return (word >> i & 1) != 0; };
  f.avx2 = ymm && bit(b7, 5);
  f.avx512 = zmm && bit(b7, 16) && bit(b7, 17) && bit(b7, 30) && bit(b7, 31);  // F, DQ, BW, VL
  f.avx512_vnni = f.avx512 && bit(c7, 11);
  f.avx512_vbmi = f.avx512 && bit(c7, 1);
  f.amx_tile = tiles && bit(d7, 24) && request_amx_tiles();
  f.amx_bf16 = f.amx_tile && bit(d7, 22);
  f.amx_int8 = f.amx_tile && bit(d7, 25);
  if (a7 >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) f.avx512_bf16 = f.avx512 && bit(a, 5);
  return f;
}

bool runs(Isa isa) {
  const CpuFeatures& f = cpu_features();
  switch (isa) {
    case Isa::kAmxEmu:
    case Isa::kScalar: return true;
    case Isa::kAvx2: return f.avx2 && f.fma && f.f16c;
    case Isa::kAvx512: return f.avx512;
    case Isa::kAvx512Bf16: return f.avx512_bf16 && f.avx512_vnni && f.avx512_vbmi;
    case Isa::kAmxBf16: return f.amx_bf16 && runs(Isa::kAvx512Bf16);
  }
  return false;
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

std::vector<std::pair<std::string, bool>> cpu_feature_list() {
  const CpuFeatures& f = cpu_features();
  return {{"avx2", f.avx2},
          {"fma", f.fma},
          {"f16c", f.f16c},
          {"avx512", f.avx512},
          {"avx512_bf16", f.avx512_bf16},
          {"avx512_vnni", f.avx512_vnni},
          {"avx512_vbmi", f.avx512_vbmi},
          {"amx_tile", f.amx_tile},
          {"amx_bf16", f.amx_bf16},
          {"amx_int8", f.amx_int8}};
}

const char* isa_name(Isa isa) { return kIsaNames[int(isa)]; }

Isa isa_from_name(const std::string& name) {
  return Isa(index_of(name, "ISA", kIsas, [](int i) { return kIsaNames[i]; }));
}

void require_isa(Isa isa) {
  KTFT_CHECK(runs(isa), "the ISA ", isa_name(isa), " cannot run on this CPU; the fastest that can is ",
             isa_name(supported_isas().back()));
}

std::vector<Isa> supported_isas() {
  std::vector<Isa> isas;
  for (int i = 0; i < kIsas; i++)
    if (runs(Isa(i))) isas.push_back(Isa(i));
  return isas;
}

Isa default_isa() {
  const std::vector<Isa> isas = supported_isas();
  const char* name = std::getenv("KTFT_ISA");
  if (!name || !*name) return isas.back();
  const Isa isa = isa_from_name(name);
  KTFT_CHECK(runs(isa), "KTFT_ISA=", name, " cannot run on this CPU; its fastest is ", isa_name(isas.back()),
             ": unset KTFT_ISA to use that");
  return isa;
}

}  // namespace ktft
