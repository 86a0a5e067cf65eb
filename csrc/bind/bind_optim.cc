#include <pybind11/stl.h>

#include "bind/bind.h"
#include "optim/adam.h"
#include "optim/norms.h"

namespace py = pybind11;

namespace ktft {

void bind_optim(py::module_& m) {
  py::class_<AdamStep>(m, "AdamStep")
      .def(py::init(
               [](float decay, float first_weight, float beta2, float second_weight, float root_scale, float eps,
                  float size) { return AdamStep{decay, first_weight, beta2, second_weight, root_scale, eps, size}; }),
           py::kw_only(), py::arg("decay"), py::arg("first_weight"), py::arg("beta2"), py::arg("second_weight"),
           py::arg("root_scale"), py::arg("eps"), py::arg("size"));
  py::class_<AdamTensor>(m, "AdamTensor")
      .def(py::init([](Dtype dtype, int64_t count, uintptr_t grad, uintptr_t param, uintptr_t exp_avg,
                       uintptr_t exp_avg_sq, const AdamStep& step) {
             const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
             return AdamTensor{dtype, count, at(grad), at(param), at(exp_avg), at(exp_avg_sq), step};
           }),
           py::arg("dtype"), py::arg("count"), py::arg("grad"), py::arg("param"), py::arg("exp_avg"),
           py::arg("exp_avg_sq"), py::arg("step"));
  py::class_<RowTensor>(m, "RowTensor")
      .def(py::init([](Dtype dtype, int64_t rows, int64_t cols, uintptr_t data) {
             return RowTensor{dtype, rows, cols, reinterpret_cast<void*>(data)};
           }),
           py::arg("dtype"), py::arg("rows"), py::arg("cols"), py::arg("data"));
  m.def("row_norms", &row_norms, py::arg("runtime"), py::arg("tensors"), py::call_guard<py::gil_scoped_release>());
  m.def("scale", &scale, py::arg("runtime"), py::arg("tensors"), py::arg("factor"),
        py::call_guard<py::gil_scoped_release>());
  m.def("adam", &adam, py::arg("runtime"), py::arg("tensors"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace ktft
