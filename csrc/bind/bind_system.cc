#include <pybind11/stl.h>

#include "base/cpu.h"
#include "bind/bind.h"
#include "kernels/kernels.h"
#include "numa/buffer.h"
#include "numa/topology.h"

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
