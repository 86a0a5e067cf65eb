// What the files of bindings share. The bindings name and convert arguments, nothing else. Arrays arrive as addresses
// that ktft/native/ has checked.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace ktft {

namespace py = pybind11;
using namespace pybind11::literals;

using Address = uintptr_t;
using NoGil = py::call_guard<py::gil_scoped_release>;

template <class T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void bind_dense(py::module_& m);  // with attention, whose projections are dense weights

}  // namespace ktft
