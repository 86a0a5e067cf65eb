#include <pybind11/stl.h>

#include "bind/bind.h"
#include "moe/layer.h"

namespace py = pybind11;

namespace ktft {
namespace {

void add_pair(Lora& lora, Projection p, Address a, Dtype a_dtype, Address b, Dtype b_dtype, int rank, int in, int out,
              float scaling, Address grad_a, Address grad_b) {
  lora.pairs[int(p)] = LoraPair{.a = {.data = at(a), .dtype = a_dtype, .rows = rank, .cols = in},
                                .b = {.data = at(b), .dtype = b_dtype, .rows = out, .cols = rank},
                                .scaling = scaling,
                                .grad_a = at<float>(grad_a),
                                .grad_b = at<float>(grad_b)};
}

std::shared_ptr<Saved> forward_layer(MoeLayer& layer, Address hidden, Dtype dtype, Address index, Address weights,
                                     int tokens, int top_k, const Lora* lora, Keep keep, int activation_bits,
                                     Address out) {
  const py::gil_scoped_release release;
  const LayerInput input{.hidden = at(hidden),
                         .dtype = dtype,
                         .top_k_index = at<int64_t>(index),
                         .top_k_weights = at<float>(weights),
                         .tokens = tokens,
                         .top_k = top_k};
  return layer.forward(input, lora, keep, activation_bits, at(out));
}

void backward_layer(MoeLayer& layer, Saved& saved, Address hidden, Address grad_output, Dtype dtype, Address weights,
                    int tokens, int top_k, const Lora* lora, Address grad_hidden, Address grad_weights) {
  const py::gil_scoped_release release;
  layer.backward(saved, at<float>(weights), lora,
                 {.hidden = at(hidden),
                  .grad_output = at(grad_output),
                  .dtype = dtype,
                  .grad_hidden = at(grad_hidden),
                  .grad_weights = at<float>(grad_weights),
                  .tokens = tokens,
                  .top_k = top_k});
}

py::tuple layer_memory_of(int hidden, int intermediate, bool biases, const std::array<int, kProjections>& ranks,
                          int64_t rows, double experts, int threads, int nodes, Keep keep) {
  CallDims dims{.shape = {.experts = 0, .hidden = hidden, .intermediate = intermediate},
                .widths = {},
                .biases = biases,
                .counts = RowCounts::expected(rows, experts)};
  dims.widths = PackedExperts::widths(dims.shape, nodes);
  std::copy(ranks.begin(), ranks.end(), dims.ranks);
  const LayerMemory memory = layer_memory(dims, threads, keep);
  return py::make_tuple(memory.workspace, memory.retained);
}

py::list slices(const MoeLayer& layer) {
  py::list all;
  for (int n = 0; n < layer.weights().nodes(); n++) {
    const SliceView view = layer.weights().view(n);
    py::list matrices;
    for (const SliceView::Matrix& m : view.matrices)
      matrices.append(py::make_tuple(m.rows, m.cols, m.tiles, m.strip_bytes, m.scales, m.bias));
    all.append(
        py::make_tuple(reinterpret_cast<Address>(view.blocks), view.expert_bytes, view.begin, view.width, matrices));
  }
  return all;
}

}  // namespace

void bind_moe(py::module_& m) {
  py::enum_<Encoding> encodings(m, "Encoding");
  for (size_t i = 0; i < std::size(kEncodingNames); i++) encodings.value(kEncodingNames[i], Encoding(i));
  py::enum_<Projection>(m, "Projection")
      .value("gate_proj", Projection::kGate)
      .value("up_proj", Projection::kUp)
      .value("down_proj", Projection::kDown);
  py::enum_<Keep>(m, "Keep")
      .value("none", Keep::kNothing)
      .value("recompute", Keep::kRoutes)
      .value("retain", Keep::kActivations);

  m.def(
      "packed_bytes",
      [](int experts, int hidden, int intermediate, const std::string& format, bool biases, int nodes) {
        return PackedExperts::packed_bytes(
            MoeLayer::checked({.experts = experts, .hidden = hidden, .intermediate = intermediate}, "experts"),
            format_from_name(format), biases, nodes);
      },
      py::arg("experts"), py::arg("hidden"), py::arg("intermediate"), py::arg("format"), py::arg("biases"),
      py::arg("nodes"));

  m.def("layer_memory", &layer_memory_of, py::arg("hidden"), py::arg("intermediate"), py::arg("biases"),
        py::arg("ranks"), py::arg("rows"), py::arg("experts"), py::arg("threads"), py::arg("nodes"), py::arg("keep"));

  py::class_<Lora>(m, "Lora")
      .def(py::init([](float dropout, uint64_t seed, Address elsewhere) {
             Lora lora;
             lora.dropout = dropout;
             lora.seed = seed;
             lora.elsewhere = at<bool>(elsewhere);
             return lora;
           }),
           py::arg("dropout"), py::arg("seed"), py::arg("elsewhere"))
      .def("add", &add_pair, py::arg("projection"), py::arg("a"), py::arg("a_dtype"), py::arg("b"), py::arg("b_dtype"),
           py::arg("rank"), py::arg("in_features"), py::arg("out_features"), py::arg("scaling"), py::arg("grad_a"),
           py::arg("grad_b"));

  py::class_<Saved, std::shared_ptr<Saved>>(m, "Saved").def_property_readonly("bytes", &Saved::bytes);

  py::class_<MoeLayer>(m, "MoeLayer")
      .def(py::init([](std::shared_ptr<Runtime> runtime, int experts, int hidden, int intermediate,
                       const std::string& format, float alpha, float limit, float shift, bool biases,
                       const std::string& name) {
             return std::make_unique<MoeLayer>(
                 std::move(runtime), ExpertShape{.experts = experts, .hidden = hidden, .intermediate = intermediate},
                 format_from_name(format), Swiglu{.alpha = alpha, .limit = limit, .shift = shift}, biases, name);
           }),
           py::arg("runtime"), py::arg("experts"), py::arg("hidden"), py::arg("intermediate"), py::arg("format"),
           py::arg("alpha"), py::arg("limit"), py::arg("shift"), py::arg("biases"), py::arg("name"))
      .def(
          "load",
          [](MoeLayer& layer, int expert, Projection p, Address data, Encoding encoding, int rows, int cols,
             Address scales, int block_rows, int block_cols, Address zeros) {
            const py::gil_scoped_release release;
            return layer.load(expert, p,
                              {.data = at(data),
                               .encoding = encoding,
                               .rows = rows,
                               .cols = cols,
                               .scales = at(scales),
                               .block_rows = block_rows,
                               .block_cols = block_cols,
                               .zeros = at<uint8_t>(zeros)});
          },
          py::arg("expert"), py::arg("projection"), py::arg("data"), py::arg("encoding"), py::arg("rows"),
          py::arg("cols"), py::arg("scales"), py::arg("block_rows"), py::arg("block_cols"), py::arg("zeros"))
      .def("load_bias", [](MoeLayer& layer, int e, Projection p, Address values,
                           int count) { layer.load_bias(e, p, at<float>(values), count); })
      .def("loaded_bias", [](const MoeLayer& layer, int e, Projection p) { return layer.weights().loaded_bias(e, p); })
      .def("bias",
           [](const MoeLayer& layer, int e, Projection p, Address out) { layer.weights().bias(e, p, at<float>(out)); })
      .def("canonical_bytes", [](const MoeLayer& layer, Projection p) { return layer.weights().canonical_bytes(p); })
      .def(
          "export_canonical",
          [](const MoeLayer& layer, int e, Projection p, Address out) {
            layer.export_canonical(e, p, at<uint8_t>(out));
          },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "import_canonical",
          [](MoeLayer& layer, int e, Projection p, Address in) { layer.import_canonical(e, p, at<uint8_t>(in)); },
          py::call_guard<py::gil_scoped_release>())
      .def("loaded", [](const MoeLayer& layer, int e, Projection p) { return layer.weights().loaded(e, p); })
      .def(
          "dequantize",
          [](const MoeLayer& layer, int e, Projection p, Address out) { layer.dequantize(e, p, at<float>(out)); },
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("bytes", [](const MoeLayer& layer) { return layer.weights().bytes(); })
      .def("slices", &slices)
      .def("forward", &forward_layer, py::arg("hidden"), py::arg("dtype"), py::arg("top_k_index"),
           py::arg("top_k_weights"), py::arg("tokens"), py::arg("top_k"), py::arg("lora"), py::arg("keep"),
           py::arg("activation_bits"), py::arg("out"))
      .def(
          "prepare",
          [](const MoeLayer& layer, Address index, int tokens, int top_k) {
            return layer.prepare(at<int64_t>(index), tokens, top_k);
          },
          py::arg("top_k_index"), py::arg("tokens"), py::arg("top_k"))
      .def("backward", &backward_layer, py::arg("saved"), py::arg("hidden"), py::arg("grad_output"), py::arg("dtype"),
           py::arg("top_k_weights"), py::arg("tokens"), py::arg("top_k"), py::arg("lora"), py::arg("grad_hidden"),
           py::arg("grad_weights"));
}

}  // namespace ktft
