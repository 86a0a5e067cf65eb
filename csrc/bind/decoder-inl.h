#pragma once

#include "bind/bind.h"
#include "decoder/decoder_layer.h"

namespace ktft {
namespace {

void bind_decoder(py::module_& m) {
  py::class_<MoeBlock>(m, "MoeBlock")
      .def(py::init([](const DenseWeight& router, MoeLayer& experts, int top_k, bool renormalize, int activation_bits,
                       Address chosen) {
             return MoeBlock{router, &experts, top_k, renormalize, activation_bits, at<int64_t>(chosen)};
           }),
           "router"_a, "experts"_a, "top_k"_a, "renormalize"_a, "activation_bits"_a, "chosen"_a)
      .def(
          "run",
          [](const MoeBlock& self, Runtime& runtime, Address x, int tokens, Address y) {
            return self.run(runtime, at<bf16>(x), tokens, at<bf16>(y));
          },
          "runtime"_a, "x"_a, "tokens"_a, "y"_a, NoGil());
  py::class_<DecoderLayer>(m, "DecoderLayer")
      .def(py::init(
               [](const Norm& attention_norm, const AttentionBlock& attention, const Norm& experts_norm,
                  const MoeBlock& experts) { return DecoderLayer{attention_norm, attention, experts_norm, experts}; }),
           "attention_norm"_a, "attention"_a, "experts_norm"_a, "experts"_a)
      .def(
          "run",
          [](const DecoderLayer& self, Runtime& runtime, const KvCache& cache, const DecodeStep& step, Address x,
             Address residual,
             Address y) { return self.run(runtime, cache, step, at<bf16>(x), at<bf16>(residual), at<bf16>(y)); },
          "runtime"_a, "cache"_a, "step"_a, "x"_a, "residual"_a, "y"_a, NoGil());
}

}  // namespace
}  // namespace ktft
