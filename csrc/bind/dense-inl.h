// Dense weights, and attention, whose projections they are.
#pragma once

#include "attention/block.h"
#include "bind/bind.h"
#include "dense/norm.h"
#include "moe/choose.h"
#include "quant/codes.h"

namespace ktft {
namespace {

bool pack_matrix(Runtime& runtime, const std::string& format, Address data, Encoding encoding, int rows, int cols,
                 Address scales, int block_rows, int block_cols, Address zeros, Address out) {
  const SourceMatrix source = source_of(data, encoding, rows, cols, scales, block_rows, block_cols, zeros);
  return pack_dense(runtime.pool, format_from_name(format), source, at(out));
}

void bind_weights(py::module_& m) {
  m.def(
      "dense_bytes",
      [](const std::string& format, int rows, int cols) { return dense_bytes(format_from_name(format), rows, cols); },
      "format"_a, "rows"_a, "cols"_a);
  m.def("pack_dense", &pack_matrix, "runtime"_a, "format"_a, "data"_a, "encoding"_a, "rows"_a, "cols"_a, "scales"_a,
        "block_rows"_a, "block_cols"_a, "zeros"_a, "out"_a, NoGil());
  py::class_<DenseWeight>(m, "DenseWeight")
      .def(py::init(
               [](const std::string& format, int rows, int cols, Address packed, Address bias, int activation_bits) {
                 return DenseWeight{format_from_name(format), rows, cols, at(packed), at<float>(bias), activation_bits};
               }),
           "format"_a, "rows"_a, "cols"_a, "packed"_a, "bias"_a, "activation_bits"_a)
      .def(
          "product",
          [](const DenseWeight& self, Runtime& runtime, Address x, int tokens, bool biased, Address y) {
            self.product(runtime, at<bf16>(x), tokens, biased, at<bf16>(y));
          },
          "runtime"_a, "x"_a, "tokens"_a, "biased"_a, "y"_a, NoGil());
  py::class_<Norm>(m, "Norm")
      .def(py::init([](int size, Address weight, float epsilon) { return Norm{size, at<bf16>(weight), epsilon}; }),
           "size"_a, "weight"_a, "epsilon"_a)
      .def(
          "run",
          [](const Norm& self, Runtime& runtime, Address x, Address residual, int tokens, Address out) {
            self.run(runtime, at<bf16>(x), at<bf16>(residual), tokens, at<bf16>(out));
          },
          "runtime"_a, "x"_a, "residual"_a, "tokens"_a, "out"_a, NoGil())
      .def(
          "run_backward",
          [](const Norm& self, Runtime& runtime, Address x, Address grad, int tokens, Address out) {
            self.run_backward(runtime, at<bf16>(x), at<bf16>(grad), tokens, at<bf16>(out));
          },
          "runtime"_a, "x"_a, "grad"_a, "tokens"_a, "out"_a, NoGil());
}

void bind_attention(py::module_& m) {
  py::class_<KvCache>(m, "KvCache")
      .def(py::init([](Address keys, int64_t block_stride, int64_t head_stride, int blocks, bool pairs) {
             return KvCache{at<bf16>(keys), block_stride, head_stride, blocks, pairs};
           }),
           "keys"_a, "block_stride"_a, "head_stride"_a, "blocks"_a, "pairs"_a);
  py::class_<DecodeStep>(m, "DecodeStep")
      .def(py::init([](int requests, Address positions, Address slots, Address block_table, int64_t table_blocks,
                       int64_t table_stride, Address lengths) {
             return DecodeStep{requests,     at<int64_t>(positions), at<int64_t>(slots),  at<int32_t>(block_table),
                               table_blocks, table_stride,           at<int32_t>(lengths)};
           }),
           "requests"_a, "positions"_a, "slots"_a, "block_table"_a, "table_blocks"_a, "table_stride"_a, "lengths"_a);
  py::class_<Heads>(m, "Heads")
      .def(py::init([](int heads, int kv_heads, int head_size, int block_size, Address query_norm, Address key_norm,
                       float epsilon, Address turns, int rotary, int positions) {
             return Heads{heads,   kv_heads,        head_size, block_size, at<bf16>(query_norm), at<bf16>(key_norm),
                          epsilon, at<bf16>(turns), rotary,    positions};
           }),
           "heads"_a, "kv_heads"_a, "head_size"_a, "block_size"_a, "query_norm"_a, "key_norm"_a, "epsilon"_a, "turns"_a,
           "rotary"_a, "positions"_a)
      .def(
          "write",
          [](const Heads& self, Runtime& runtime, int tokens, Address qkv, Address positions, Address slots,
             const KvCache& cache) {
            self.write(runtime, {tokens, at<bf16>(qkv), at<int64_t>(positions), at<int64_t>(slots)}, cache);
          },
          "runtime"_a, "tokens"_a, "qkv"_a, "positions"_a, "slots"_a, "cache"_a, NoGil());
  py::class_<DecodeAttention>(m, "DecodeAttention")
      .def(py::init([](int heads, int kv_heads, int head_size, int block_size, float scale, int window, Address sinks) {
             return DecodeAttention{heads, kv_heads, head_size, block_size, scale, window, at<float>(sinks)};
           }),
           "heads"_a, "kv_heads"_a, "head_size"_a, "block_size"_a, "scale"_a, "window"_a, "sinks"_a)
      .def(
          "run",
          [](const DecodeAttention& self, Runtime& runtime, const KvCache& cache, const DecodeStep& step, Address query,
             int64_t query_stride, Address out) {
            self.run(runtime, cache,
                     {step.requests, at<bf16>(query), query_stride, step.block_table, step.table_blocks,
                      step.table_stride, step.lengths},
                     at<bf16>(out));
          },
          "runtime"_a, "cache"_a, "step"_a, "query"_a, "query_stride"_a, "out"_a, NoGil());
  py::class_<AttentionBlock>(m, "AttentionBlock")
      .def(py::init([](const DenseWeight& qkv, const Heads& heads, const DecodeAttention& attention,
                       const DenseWeight& out) { return AttentionBlock{qkv, heads, attention, out}; }),
           "qkv"_a, "heads"_a, "attention"_a, "out"_a)
      .def_property_readonly("spare_elements", &AttentionBlock::spare_elements)
      .def(
          "run",
          [](const AttentionBlock& self, Runtime& runtime, const KvCache& cache, const DecodeStep& step, Address x,
             Address spare, Address y) { self.run(runtime, cache, step, at<bf16>(x), at<bf16>(spare), at<bf16>(y)); },
          "runtime"_a, "cache"_a, "step"_a, "x"_a, "spare"_a, "y"_a, NoGil());
}

void bind_choice(py::module_& m) {
  m.def(
      "choose_experts",
      [](Runtime& runtime, Address logits, int tokens, int experts, int top_k, bool renormalize, Address chosen,
         Address weights) {
        choose_experts(runtime, at<bf16>(logits), tokens, experts, top_k, renormalize, at<int64_t>(chosen),
                       at<float>(weights));
      },
      "runtime"_a, "logits"_a, "tokens"_a, "experts"_a, "top_k"_a, "renormalize"_a, "chosen"_a, "weights"_a, NoGil());
}

void bind_dense(py::module_& m) {
  bind_weights(m);
  bind_attention(m);
  bind_choice(m);
}

}  // namespace
}  // namespace ktft
