#include <pybind11/stl.h>

#include "bind/bind.h"
#include "optim/adam.h"
#include "optim/norms.h"

namespace py = pybind11;

namespace ktft {

void bind_optim(py::module_& m) {
  py::class_<AdamStep>(m, "AdamStep")
      .def(py::init([](float decay, float first_weight, float beta2, float second_weight, float root_scale, float eps,
                       float size) {
             return AdamStep{.decay = decay,
                             .first_weight = first_weight,
                             .beta2 = beta2,
                             .second_weight = second_weight,
                             .root_scale = root_scale,
                             .eps = eps,
                             .size = size};
           }),
           py::kw_only(), py::arg("decay"), py::arg("first_weight"), py::arg("beta2"), py::arg("second_weight"),
           py::arg("root_scale"), py::arg("eps"), py::arg("size"));
  py::class_<AdamTensor>(m, "AdamTensor")
      .def(py::init([](Dtype dtype, int64_t count, Address grad, Address param, Address exp_avg, Address exp_avg_sq,
                       const AdamStep& step) {
             return AdamTensor{.dtype = dtype,
                               .count = count,
                               .grad = at(grad),
                               .param = at(param),
                               .exp_avg = at(exp_avg),
                               .exp_avg_sq = at(exp_avg_sq),
                               .step = step};
           }),
           py::arg("dtype"), py::arg("count"), py::arg("grad"), py::arg("param"), py::arg("exp_avg"),
           py::arg("exp_avg_sq"), py::arg("step"));
  py::class_<RowTensor>(m, "RowTensor")
      .def(py::init([](Dtype dtype, int64_t rows, int64_t cols, Address data) {
             return RowTensor{.dtype = dtype, .rows = rows, .cols = cols, .data = at(data)};
           }),
           py::arg("dtype"), py::arg("rows"), py::arg("cols"), py::arg("data"));
  m.def("row_norms", &row_norms, py::arg("runtime"), py::arg("tensors"), py::call_guard<py::gil_scoped_release>());
  m.def("scale", &scale, py::arg("runtime"), py::arg("tensors"), py::arg("factor"),
        py::call_guard<py::gil_scoped_release>());
  m.def("adam", &adam, py::arg("runtime"), py::arg("tensors"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace ktft
