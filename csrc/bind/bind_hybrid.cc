#include <pybind11/stl.h>

#include "bind/bind.h"
#include "hybrid/host_experts.h"

namespace py = pybind11;

namespace ktft {

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
           py::arg("runtime"), py::arg("driver"), py::arg("device"), py::arg("max_tokens"), py::arg("hidden"),
           py::arg("top_k"), py::arg("dtype"), py::arg("slots"), py::arg("activation_bits"), py::arg("through"))
      .def(
          "submit",
          [](HostExperts& experts, MoeLayer& layer, Address hidden, Address index, size_t index_bytes, Address weights,
             int tokens, int slot, Address stream) {
            const DeviceRoutes routes{
                .hidden = hidden, .index = index, .index_bytes = index_bytes, .weights = weights, .tokens = tokens};
            experts.submit(layer, routes, slot, stream);
          },
          py::arg("layer"), py::arg("hidden"), py::arg("index"), py::arg("index_bytes"), py::arg("weights"),
          py::arg("tokens"), py::arg("slot"), py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def("wait", &HostExperts::wait, py::arg("layer"), py::arg("tokens"), py::arg("slot"), py::arg("out"),
           py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def("set_lora", &HostExperts::set_lora, py::arg("layer"), py::arg("lora"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("error", &HostExperts::error)
      .def("counts", &HostExperts::counts, py::arg("layer"))
      .def("seconds", &HostExperts::seconds, py::arg("layer"))
      .def_property_readonly("arena_bytes", &HostExperts::arena_bytes)
      .def("close", &HostExperts::close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace ktft
