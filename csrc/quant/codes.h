// What a format's bytes stand for, as other decoders must know it: torch's and Triton's, in ktft/lanes/ops.
#pragma once

#include <string>
#include <vector>

#include "quant/format.h"

namespace ktft {

struct CodeTable {
  const char* codes;                  // the codec's kCodes
  const char* group_scales = "none";  // how a stored scale of a group becomes its multiplier: the policy's kScaleKind
  std::vector<float> values{};        // what the 16 of 4 bits stand for
  float unit = 1;                     // of which all values are whole multiples
  std::vector<float> multipliers{};   // of each group scale that is a byte
};

CodeTable code_table(Format format);
Format format_from_name(const std::string& name);  // throws, listing the names

}  // namespace ktft
