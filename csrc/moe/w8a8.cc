#include "moe/w8a8.h"

#include "base/cpu.h"

namespace ktft {

void check_w8a8(const char* name, Isa isa, const PackedExperts& weights) {
  const char* const format = info(weights.format()).name;
  KTFT_CHECK(
      weights.format() == Format::kInt8, name, ": activation_bits is 8, but the experts' format is ", format,
      ", and 8-bit activations need int8 or a 4-bit format: pack the experts so, or leave activation_bits at 16");
  KTFT_CHECK(int8_kernels(isa), name, ": activation_bits is 8, but the ISA is ", isa_name(isa),
             ", and 8-bit activations of int8 need avx512_bf16 or tiles (amx_bf16 or amx_emu): leave activation_bits "
             "at 16 here, or pack the experts in a 4-bit format");
  KTFT_CHECK(isa != Isa::kAmxBf16 || cpu_features().amx_int8, name,
             ": activation_bits is 8, but this CPU has no AMX-INT8: leave activation_bits at 16 here");
  const int longest = std::max(weights.shape().hidden, weights.shape().intermediate);
  KTFT_CHECK(longest <= kMaxInt8Reduction, name, ": activation_bits is 8, but sums over ", longest,
             " products of int8 can exceed int32, which holds ", kMaxInt8Reduction, ": leave activation_bits at 16");
}

void quantize(const Call& call, const bf16* rows, int cols, const RowChunk& chunk, const Int8Rows& out) {
  for (int t = 0; t < chunk.rows; t += kTileRows) {
    const Int8Rows at = int8_rows_at(out, chunk.packed + t, cols);
    int8_kernels(call.runtime.isa)->quantize(rows + activation_elements(t, cols), cols, at.codes, at.scales);
  }
}

void quantize_h(const Call& call, const Activations& act, int node, const RowChunk& chunk) {
  const int width = call.weights.width(node);
  quantize(call, act.nodes[node].h + activation_elements(chunk.packed, width), width, chunk, act.nodes[node].int8_h);
}

void int8_product(const Call& call, const GemmArgs& args, const Int8Rows& x, Scratch& scratch) {
  Int8GemmArgs out{.gemm = args, .x = x, .add = {}};
  for (int i = 0; i < args.count; i++) {
    const GemmTerm& term = args.terms[i];
    if (!term.lora) continue;
    float* const lora = scratch.take<float>(size_t(pad_rows(args.tokens)) * args.out_count);
    GemmArgs low_rank = args;
    low_rank.count = 1;
    low_rank.terms[0] = {.w = term.lora, .out_begin = term.lora_begin, .x = term.low_rank, .c = lora};
    run_gemm(call, Format::kBf16, Pass::kForward, low_rank);
    out.add[i] = lora;
  }
  int8_kernels(call.runtime.isa)->gemm(out);
}

}  // namespace ktft
