#include "bench/ceilings.h"
#include "bind/bind.h"

namespace py = pybind11;

namespace ktft {

void bind_bench(py::module_& m) {
  py::enum_<Ceiling>(m, "Ceiling").value("registers", Ceiling::kRegisters).value("hot", Ceiling::kHot);
  m.def("measure_flops", &measure_flops, py::arg("runtime"), py::arg("ceiling"), py::arg("seconds"),
        py::call_guard<py::gil_scoped_release>());
  py::class_<StreamedMemory>(m, "StreamedMemory")
      .def(py::init<std::shared_ptr<Runtime>, size_t>(), py::arg("runtime"), py::arg("bytes"),
           py::call_guard<py::gil_scoped_release>())
      .def("read", &StreamedMemory::read, py::call_guard<py::gil_scoped_release>())
      .def("update", &StreamedMemory::update, py::call_guard<py::gil_scoped_release>())
      .def("gemm", &StreamedMemory::gemm, py::arg("tokens"), py::arg("reduction"),
           py::call_guard<py::gil_scoped_release>());
}

}  // namespace ktft
