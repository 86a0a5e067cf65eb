#include <pybind11/stl.h>

#include "bind/bind.h"
#include "cuda/driver.h"

namespace py = pybind11;

namespace ktft {

void bind_cuda(py::module_& m) {
  py::register_exception<CudaError>(m, "CudaError", PyExc_RuntimeError);
  py::enum_<CopyDirection>(m, "CopyDirection")
      .value("to_device", CopyDirection::kToDevice)
      .value("to_host", CopyDirection::kToHost)
      .value("on_device", CopyDirection::kOnDevice);
  py::class_<RowCopy>(m, "RowCopy")
      .def(py::init<uintptr_t, uintptr_t, size_t, size_t, size_t>(), py::arg("all"), py::arg("chosen"),
           py::arg("bytes"), py::arg("all_stride"), py::arg("chosen_stride"))
      .def_readonly("bytes", &RowCopy::bytes);
  m.def("copy_on_host", &copy_on_host, py::arg("rows"), py::arg("matrices"), py::arg("gather"), py::arg("threads"),
        py::call_guard<py::gil_scoped_release>());
  py::class_<CudaDriver, std::shared_ptr<CudaDriver>>(m, "CudaDriver")
      .def(py::init<const std::string&>(), py::arg("library"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("devices", &CudaDriver::devices)
      .def("has_words", &CudaDriver::has_words, py::arg("device"))
      .def("register_host", &CudaDriver::register_host, py::arg("device"), py::arg("address"), py::arg("bytes"),
           py::arg("mapped") = false, py::call_guard<py::gil_scoped_release>())
      .def("unregister_host", &CudaDriver::unregister_host, py::arg("device"), py::arg("address"),
           py::call_guard<py::gil_scoped_release>())
      .def("copy", &CudaDriver::copy, py::arg("device"), py::arg("direction"), py::arg("rows"), py::arg("matrices"),
           py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace ktft
