// What a format's bytes stand for, as other decoders must know it: torch's and Triton's, in ktft/lanes/ops.
#pragma once

#include <vector>

#include "quant/format.h"

namespace ktft {

struct CodeTable {
  const char* codes;                  // the codec's kCodes
  const char* group_scales = "none";  // how a stored scale of a group becomes its multiplier: the policy's kScaleKind
  // Of 4-bit codes: what the 16 of them stand for, and the unit of which all these values are whole multiples. Where
  // group scales are bytes, the multiplier of each.
  std::vector<float> values;
  float unit = 1;
  std::vector<float> multipliers;
};

CodeTable code_table(Format format);

}  // namespace ktft
