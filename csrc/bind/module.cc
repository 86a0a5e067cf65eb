// All bindings are compiled as one file because pybind11's templates, which take most of its time to compile, would be
// the same in each.
#include <pybind11/stl.h>

#include "base/cpu.h"
#include "bench/ceilings.h"
#include "bind/bind.h"
#include "bind/decoder-inl.h"
#include "bind/dense-inl.h"
#include "cuda/driver.h"
#include "hybrid/host_experts.h"
#include "moe/layer.h"
#include "numa/topology.h"
#include "optim/step.h"
#include "quant/codes.h"

namespace ktft {
namespace {

py::dict topology_dict() {
  const Topology t = read_topology();
  py::list nodes;
  for (const Node& n : t.nodes)
    nodes.append(py::dict("id"_a = n.id, "cpus"_a = n.cpus, "cores"_a = n.cores, "memory_bytes"_a = n.memory_bytes,
                          "free_bytes"_a = n.free_bytes));
  return py::dict("nodes"_a = nodes,
                  "cgroup_cpus"_a = t.cgroup_cpus > 0 ? py::object(py::float_(t.cgroup_cpus)) : py::none(),
                  "cores"_a = t.cores(), "mbind"_a = node_binding_status());
}

// A row for each GEMM of the kernel table.
py::list kernel_list() {
  py::list out;
  for (int i = 0; i < kIsas; i++)
    for (const FormatInfo& format : kFormatInfo)
      for (const bool backward : {false, true}) {
        const std::string isa = isa_name(Isa(i)), name = isa + "_" + format.name;
        out.append(py::dict("name"_a = name + (backward ? "_backward" : "_forward"), "isa"_a = isa,
                            "format"_a = format.name, "backward"_a = backward));
      }
  return out;
}

void bind_system(py::module_& m) {
  py::enum_<Dtype>(m, "Dtype").value("f32", Dtype::kF32).value("bf16", Dtype::kBf16).value("f16", Dtype::kF16);
  py::class_<Runtime, std::shared_ptr<Runtime>>(m, "Runtime")
      .def(py::init([](const std::string& isa, int threads, int nodes) {
             return Runtime::create(isa_from_name(isa), threads, nodes);
           }),
           "isa"_a, "threads"_a, "nodes"_a)
      .def_property_readonly("isa", [](const Runtime& r) { return isa_name(r.isa); })
      .def_property_readonly("threads", [](const Runtime& r) { return r.pool.threads(); })
      .def_property_readonly("nodes", [](const Runtime& r) { return r.pool.nodes(); })
      .def_property_readonly("workspace_bytes", &workspace_bytes)
      .def("take_phases", &Runtime::take_phases)
      .def("take_weight_bytes", [](Runtime& r) { return r.weight_bytes.exchange(0); })
      .def(
          "spin_for",
          [](Runtime& r, double seconds) {
            return r.pool.spin_for(std::chrono::nanoseconds(int64_t(seconds * 1e9))).count() / 1e9;
          },
          "seconds"_a);
  m.def("cpu_features", &cpu_feature_list);
  m.def("isas", [] {
    py::list names;
    for (Isa isa : supported_isas()) names.append(isa_name(isa));
    return names;
  });
  m.def("default_isa", [] { return isa_name(default_isa()); });
  m.def("topology", &topology_dict);
  m.def("kernels", &kernel_list);
}

py::dict format_row(Format format) {
  const FormatInfo& f = info(format);
  const CodeTable table = code_table(format);
  return py::dict("name"_a = f.name, "tile_cols"_a = f.tile_cols, "tile_bytes"_a = f.tile_bytes,
                  "row_scaled"_a = f.row_scaled, "block_scaled"_a = f.block_scaled, "codes"_a = table.codes,
                  "values"_a = py::tuple(py::cast(table.values)), "unit"_a = table.unit,
                  "group_scales"_a = table.group_scales, "multipliers"_a = py::tuple(py::cast(table.multipliers)));
}

void bind_quant(py::module_& m) {
  m.attr("TILE_ROWS") = kTileRows;
  m.attr("ROW_BYTES") = kRowBytes;
  m.attr("GROUP") = kGroup;
  m.attr("SCALE_BLOCK") = kScaleBlock;
  py::list names, rows;
  for (int i = 0; i < kFormats; i++) {
    names.append(kFormatInfo[i].name);
    rows.append(format_row(Format(i)));
  }
  m.attr("FORMATS") = py::tuple(names);
  m.attr("FORMAT_ROWS") = py::tuple(rows);
}

void bind_cuda(py::module_& m) {
  py::register_exception<CudaError>(m, "CudaError", PyExc_RuntimeError);
  py::enum_<CopyDirection>(m, "CopyDirection")
      .value("to_device", CopyDirection::kToDevice)
      .value("to_host", CopyDirection::kToHost);
  py::class_<RowCopy>(m, "RowCopy")
      .def(py::init<uintptr_t, uintptr_t, size_t, size_t, size_t>(), "all"_a, "chosen"_a, "bytes"_a, "all_stride"_a,
           "chosen_stride"_a)
      .def_readonly("bytes", &RowCopy::bytes);
  m.def("copy_on_host", &copy_on_host, "rows"_a, "matrices"_a, "gather"_a, "threads"_a, NoGil());
  py::class_<CudaDriver, std::shared_ptr<CudaDriver>>(m, "CudaDriver")
      .def(py::init<const std::string&>(), "library"_a, NoGil())
      .def_property_readonly("devices", &CudaDriver::devices)
      .def("has_words", &CudaDriver::has_words, "device"_a)
      .def("register_host", &CudaDriver::register_host, "device"_a, "address"_a, "bytes"_a, "mapped"_a = false, NoGil())
      .def("unregister_host", &CudaDriver::unregister_host, "device"_a, "address"_a, NoGil())
      .def("copy", &CudaDriver::copy, "device"_a, "direction"_a, "rows"_a, "matrices"_a, "stream"_a, NoGil());
}

void add_pair(Lora& lora, Projection p, Address a, Dtype a_dtype, Address b, Dtype b_dtype, int rank, int in, int out,
              float scaling, Address grad_a, Address grad_b) {
  lora.pairs[int(p)] = LoraPair{.a = {.data = at(a), .dtype = a_dtype, .rows = rank, .cols = in},
                                .b = {.data = at(b), .dtype = b_dtype, .rows = out, .cols = rank},
                                .scaling = scaling,
                                .grad_a = at<float>(grad_a),
                                .grad_b = at<float>(grad_b)};
}

py::tuple layer_memory_of(int hidden, int intermediate, bool gated, bool biases,
                          const std::array<int, kProjections>& ranks, int64_t rows, double experts, int threads,
                          int nodes, Keep keep) {
  CallDims dims{.shape = {.experts = 0, .hidden = hidden, .intermediate = intermediate, .gated = gated},
                .widths = {},
                .biases = biases,
                .counts = RowCounts::expected(rows, experts)};
  dims.widths = PackedExperts::widths(dims.shape, nodes);
  std::copy(ranks.begin(), ranks.end(), dims.ranks);
  const LayerMemory memory = layer_memory(dims, threads, keep);
  return py::make_tuple(memory.workspace, memory.retained);
}

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
      [](int experts, int hidden, int intermediate, bool gated, const std::string& format, bool biases, int nodes) {
        const ExpertShape shape{.experts = experts, .hidden = hidden, .intermediate = intermediate, .gated = gated};
        return PackedExperts::packed_bytes(MoeLayer::checked(shape, "experts"), format_from_name(format), biases,
                                           nodes);
      },
      "experts"_a, "hidden"_a, "intermediate"_a, "gated"_a, "format"_a, "biases"_a, "nodes"_a);
  m.def("layer_memory", &layer_memory_of, "hidden"_a, "intermediate"_a, "gated"_a, "biases"_a, "ranks"_a, "rows"_a,
        "experts"_a, "threads"_a, "nodes"_a, "keep"_a);
  py::class_<Lora>(m, "Lora")
      .def(py::init([](float dropout, uint64_t seed, uint64_t first_route, Address elsewhere) {
             return Lora{
                 .dropout = dropout, .seed = seed, .first_route = first_route, .elsewhere = at<bool>(elsewhere)};
           }),
           "dropout"_a, "seed"_a, "first_route"_a, "elsewhere"_a)
      .def("add", &add_pair, "projection"_a, "a"_a, "a_dtype"_a, "b"_a, "b_dtype"_a, "rank"_a, "in_features"_a,
           "out_features"_a, "scaling"_a, "grad_a"_a, "grad_b"_a);
  py::class_<Saved, std::shared_ptr<Saved>>(m, "Saved").def_property_readonly("bytes", &Saved::bytes);
}

bool load(MoeLayer& layer, int expert, Projection p, Address data, Encoding encoding, int rows, int cols,
          Address scales, int block_rows, int block_cols, Address zeros) {
  return layer.load(expert, p, source_of(data, encoding, rows, cols, scales, block_rows, block_cols, zeros));
}

std::shared_ptr<Saved> forward_layer(MoeLayer& layer, Address hidden, Dtype dtype, Address index, Address weights,
                                     int tokens, int top_k, const Lora* lora, Keep keep, int activation_bits,
                                     Address out) {
  const LayerInput input{.hidden = at(hidden),
                         .dtype = dtype,
                         .top_k_index = at<int64_t>(index),
                         .top_k_weights = at<float>(weights),
                         .tokens = tokens,
                         .top_k = top_k};
  return layer.forward(input, lora, keep, activation_bits, at(out));
}

void forward_adapters(MoeLayer& layer, Address hidden, Dtype dtype, Address index, Address weights, int tokens,
                      int top_k, const std::vector<const Lora*>& loras, Address of_token, int activation_bits,
                      Address out) {
  const LayerInput input{.hidden = at(hidden),
                         .dtype = dtype,
                         .top_k_index = at<int64_t>(index),
                         .top_k_weights = at<float>(weights),
                         .tokens = tokens,
                         .top_k = top_k};
  layer.forward_adapters(input, loras, at<int32_t>(of_token), activation_bits, at(out));
}

void backward_layer(MoeLayer& layer, Saved& saved, Address hidden, Address grad_output, Dtype dtype, Address weights,
                    int tokens, int top_k, const Lora* lora, Address grad_hidden, Address grad_weights) {
  layer.backward(saved, at<float>(weights), lora,
                 {.hidden = at(hidden),
                  .grad_output = at(grad_output),
                  .dtype = dtype,
                  .grad_hidden = at(grad_hidden),
                  .grad_weights = at<float>(grad_weights),
                  .tokens = tokens,
                  .top_k = top_k});
}

// What PackedSlice of ktft/native/packed.py says of each node. A block begins with gate's tiles, even where there are
// none.
py::list slices(const MoeLayer& layer) {
  const PackedExperts& weights = layer.weights();
  py::list all;
  for (int n = 0; n < weights.nodes(); n++) {
    const uint8_t* const block = weights.matrix(n, 0, Projection::kGate).tiles;
    const auto offset = [&](const void* at) { return at ? static_cast<const uint8_t*>(at) - block : -1; };
    py::list matrices;
    for (int p = 0; p < kProjections; p++) {
      const PackedMatrix m = weights.matrix(n, 0, Projection(p));
      matrices.append(py::make_tuple(m.rows, m.cols, offset(m.tiles), m.strip_bytes,
                                     offset(m.row_scale ? m.row_scale : m.block_scale), offset(m.bias)));
    }
    all.append(py::make_tuple(reinterpret_cast<Address>(block), weights.expert_bytes(n), weights.begin(n),
                              weights.width(n), matrices));
  }
  return all;
}

void bind_layer(py::module_& m) {
  py::class_<MoeLayer>(m, "MoeLayer")
      .def(py::init([](std::shared_ptr<Runtime> runtime, int experts, int hidden, int intermediate,
                       const std::string& format, float alpha, float limit, float shift, float cubic, float gate_limit,
                       bool gated, bool biases, const std::string& name) {
             const ExpertShape shape{
                 .experts = experts, .hidden = hidden, .intermediate = intermediate, .gated = gated};
             const Swiglu swiglu{.alpha = alpha,
                                 .limit = limit,
                                 .shift = shift,
                                 .cubic = cubic,
                                 .gate_limit = gate_limit,
                                 .gated = gated};
             return std::make_unique<MoeLayer>(std::move(runtime), shape, format_from_name(format), swiglu, biases,
                                               name);
           }),
           "runtime"_a, "experts"_a, "hidden"_a, "intermediate"_a, "format"_a, "alpha"_a, "limit"_a, "shift"_a,
           "cubic"_a, "gate_limit"_a, "gated"_a, "biases"_a, "name"_a)
      .def("load", &load, "expert"_a, "projection"_a, "data"_a, "encoding"_a, "rows"_a, "cols"_a, "scales"_a,
           "block_rows"_a, "block_cols"_a, "zeros"_a, NoGil())
      .def("load_bias", [](MoeLayer& layer, int e, Projection p, Address values,
                           int count) { layer.load_bias(e, p, at<float>(values), count); })
      .def("loaded", [](const MoeLayer& layer, int e, Projection p) { return layer.weights().loaded(e, p); })
      .def("loaded_bias", [](const MoeLayer& layer, int e, Projection p) { return layer.weights().loaded_bias(e, p); })
      .def("bias",
           [](const MoeLayer& layer, int e, Projection p, Address out) { layer.weights().bias(e, p, at<float>(out)); })
      .def(
          "dequantize",
          [](const MoeLayer& layer, int e, Projection p, Address out) { layer.dequantize(e, p, at<float>(out)); },
          NoGil())
      .def("canonical_bytes", [](const MoeLayer& layer, Projection p) { return layer.weights().canonical_bytes(p); })
      .def(
          "export_canonical",
          [](const MoeLayer& layer, int e, Projection p, Address out) {
            layer.export_canonical(e, p, at<uint8_t>(out));
          },
          NoGil())
      .def(
          "import_canonical",
          [](MoeLayer& layer, int e, Projection p, Address in) { layer.import_canonical(e, p, at<uint8_t>(in)); },
          NoGil())
      .def_property_readonly("bytes", [](const MoeLayer& layer) { return layer.weights().bytes(); })
      .def("slices", &slices)
      .def("forward", &forward_layer, "hidden"_a, "dtype"_a, "top_k_index"_a, "top_k_weights"_a, "tokens"_a, "top_k"_a,
           "lora"_a, "keep"_a, "activation_bits"_a, "out"_a, NoGil())
      .def("keep", &MoeLayer::keep, "lora"_a, NoGil())
      .def("forward_adapters", &forward_adapters, "hidden"_a, "dtype"_a, "top_k_index"_a, "top_k_weights"_a, "tokens"_a,
           "top_k"_a, "loras"_a, "of_token"_a, "activation_bits"_a, "out"_a, NoGil())
      .def(
          "prepare",
          [](const MoeLayer& layer, Address index, int tokens, int top_k) {
            return layer.prepare(at<int64_t>(index), tokens, top_k);
          },
          "top_k_index"_a, "tokens"_a, "top_k"_a)
      .def("backward", &backward_layer, "saved"_a, "hidden"_a, "grad_output"_a, "dtype"_a, "top_k_weights"_a,
           "tokens"_a, "top_k"_a, "lora"_a, "grad_hidden"_a, "grad_weights"_a, NoGil());
}

void bind_hybrid(py::module_& m) {
  py::enum_<Through>(m, "Through").value("words", Through::kWords).value("host_functions", Through::kHostFunctions);
  py::class_<HostExperts>(m, "HostExperts")
      .def(py::init([](std::shared_ptr<Runtime> runtime, std::shared_ptr<CudaDriver> driver, int device, int max_tokens,
                       int hidden, int top_k, Dtype dtype, int slots, int activation_bits, Through through) {
             return std::make_unique<HostExperts>(
                 std::move(runtime), std::move(driver), device,
                 HostExpertsShape{
                     .max_tokens = max_tokens, .hidden = hidden, .top_k = top_k, .dtype = dtype, .slots = slots},
                 activation_bits, through);
           }),
           "runtime"_a, "driver"_a, "device"_a, "max_tokens"_a, "hidden"_a, "top_k"_a, "dtype"_a, "slots"_a,
           "activation_bits"_a, "through"_a)
      .def("submit", &HostExperts::submit, "layer"_a, "hidden"_a, "index"_a, "index_bytes"_a, "weights"_a, "of_token"_a,
           "tokens"_a, "slot"_a, "stream"_a, NoGil())
      .def("wait", &HostExperts::wait, "layer"_a, "tokens"_a, "slot"_a, "out"_a, "stream"_a, NoGil())
      .def(
          "place",
          [](HostExperts& host, int slot, uintptr_t stream) {
            const HostExperts::Place found = host.place(slot, stream);
            return py::make_tuple(found.hidden, found.index, found.weights, found.of_token, found.out);
          },
          "slot"_a, "stream"_a)
      .def("submit_in_place", &HostExperts::submit_in_place, "layer"_a, "tokens"_a, "slot"_a, "index_bytes"_a,
           "adapters"_a, "stream"_a, NoGil())
      .def("wait_in_place", &HostExperts::wait_in_place, "layer"_a, "tokens"_a, "slot"_a, "stream"_a, NoGil())
      .def("set_adapter", &HostExperts::set_adapter, "layer"_a, "place"_a, "lora"_a, NoGil())
      .def_property_readonly("error", &HostExperts::error)
      .def("counts", &HostExperts::counts, "layer"_a)
      .def("seconds", &HostExperts::seconds, "layer"_a)
      .def_property_readonly("arena_bytes", &HostExperts::arena_bytes)
      .def("close", &HostExperts::close, NoGil());
}

void bind_optim(py::module_& m) {
  py::class_<AdamStep>(m, "AdamStep")
      .def(py::init<float, float, float, float, float, float, float>(), py::kw_only(), "decay"_a, "first_weight"_a,
           "beta2"_a, "second_weight"_a, "root_scale"_a, "eps"_a, "size"_a);
  py::class_<AdamTensor>(m, "AdamTensor")
      .def(py::init([](Dtype dtype, int64_t count, Address grad, Address param, Address exp_avg, Address exp_avg_sq,
                       const AdamStep& step, float grad_factor) {
             return AdamTensor{.dtype = dtype,
                               .count = count,
                               .grad_factor = grad_factor,
                               .grad = at(grad),
                               .param = at(param),
                               .exp_avg = at(exp_avg),
                               .exp_avg_sq = at(exp_avg_sq),
                               .step = step};
           }),
           "dtype"_a, "count"_a, "grad"_a, "param"_a, "exp_avg"_a, "exp_avg_sq"_a, "step"_a, "grad_factor"_a);
  py::class_<RowTensor>(m, "RowTensor")
      .def(py::init([](Dtype dtype, int64_t rows, int64_t cols, Address data) {
             return RowTensor{.dtype = dtype, .rows = rows, .cols = cols, .data = at(data)};
           }),
           "dtype"_a, "rows"_a, "cols"_a, "data"_a);
  m.def(
      "row_norms",
      [](Runtime& runtime, const std::vector<RowTensor>& tensors, Address norms) {
        row_norms(runtime, tensors, at<float>(norms));
      },
      "runtime"_a, "tensors"_a, "norms"_a, NoGil());
  m.def("row_bits", &row_bits, "runtime"_a, "tensors"_a, NoGil());
  m.def("scale", &scale, "runtime"_a, "tensors"_a, "factor"_a, NoGil());
  m.def("adam", &adam, "runtime"_a, "tensors"_a, NoGil());
}

void bind_bench(py::module_& m) {
  py::enum_<Ceiling>(m, "Ceiling").value("registers", Ceiling::kRegisters).value("hot", Ceiling::kHot);
  m.def("measure_flops", &measure_flops, "runtime"_a, "ceiling"_a, "seconds"_a, NoGil());
  py::class_<StreamedMemory>(m, "StreamedMemory")
      .def(py::init<std::shared_ptr<Runtime>, size_t>(), "runtime"_a, "bytes"_a, NoGil())
      .def("read", &StreamedMemory::read, NoGil())
      .def("update", &StreamedMemory::update, NoGil())
      .def("gemm", &StreamedMemory::gemm, "tokens"_a, "reduction"_a, NoGil());
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "ktft's native core; import ktft.native instead";
  bind_system(m);
  bind_quant(m);
  bind_moe(m);
  bind_dense(m);
  bind_layer(m);
  bind_decoder(m);
  bind_cuda(m);
  bind_hybrid(m);
  bind_optim(m);
  bind_bench(m);
}

}  // namespace ktft
