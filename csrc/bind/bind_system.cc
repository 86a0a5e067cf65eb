#include <pybind11/stl.h>

#include "base/cpu.h"
#include "bind/bind.h"
#include "moe/workspace.h"

namespace py = pybind11;

namespace ktft {
namespace {

py::dict topology_dict() {
  const Topology t = read_topology();
  py::list nodes;
  for (const Node& n : t.nodes)
    nodes.append(py::dict(py::arg("id") = n.id, py::arg("cpus") = n.cpus, py::arg("cores") = n.cores,
                          py::arg("memory_bytes") = n.memory_bytes, py::arg("free_bytes") = n.free_bytes));
  return py::dict(py::arg("nodes") = nodes,
                  py::arg("cgroup_cpus") = t.cgroup_cpus > 0 ? py::object(py::float_(t.cgroup_cpus)) : py::none(),
                  py::arg("cores") = t.cores(), py::arg("mbind") = node_binding_status());
}

py::list kernel_list() {
  py::list out;
  for (const GemmKernel& k : gemm_table())
    out.append(py::dict(py::arg("name") = k.name, py::arg("isa") = isa_name(k.isa),
                        py::arg("format") = info(k.format).name, py::arg("backward") = k.pass == Pass::kBackward));
  return out;
}

}  // namespace

void bind_system(py::module_& m) {
  py::enum_<Dtype>(m, "Dtype").value("f32", Dtype::kF32).value("bf16", Dtype::kBf16).value("f16", Dtype::kF16);
  py::class_<Runtime, std::shared_ptr<Runtime>>(m, "Runtime")
      .def(py::init([](const std::string& isa, int threads, int nodes) {
             return Runtime::create(isa_from_name(isa), threads, nodes);
           }),
           py::arg("isa"), py::arg("threads"), py::arg("nodes"))
      .def_property_readonly("isa", [](const Runtime& r) { return isa_name(r.isa); })
      .def_property_readonly("threads", [](const Runtime& r) { return r.pool.threads(); })
      .def_property_readonly("nodes", [](const Runtime& r) { return r.pool.nodes(); })
      .def_property_readonly("workspace_bytes", &workspace_bytes)
      .def("take_phases", &Runtime::take_phases)
      .def("take_weight_bytes", [](Runtime& r) { return r.weight_bytes.exchange(0); });
  m.def("cpu_features", [] {
    py::dict d;
    for (const auto& [name, usable] : cpu_feature_list()) d[name.c_str()] = usable;
    return d;
  });
  m.def("isas", [] {
    py::list names;
    for (Isa isa : supported_isas()) names.append(isa_name(isa));
    return names;
  });
  m.def("default_isa", [] { return isa_name(default_isa()); });
  m.def("topology", &topology_dict);
  m.def("kernels", &kernel_list);
  py::list formats;
  for (const FormatInfo& f : kFormatInfo) formats.append(f.name);
  m.attr("FORMATS") = py::tuple(formats);
}

}  // namespace ktft
