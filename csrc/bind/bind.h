// The bindings only name and convert arguments; they have no logic. Arrays arrive as addresses that ktft/native/ has
// checked.
#pragma once

#include <pybind11/pybind11.h>

namespace ktft {

using Address = uintptr_t;

template <class T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void bind_system(pybind11::module_& m);
void bind_quant(pybind11::module_& m);
void bind_moe(pybind11::module_& m);
void bind_optim(pybind11::module_& m);
void bind_bench(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_hybrid(pybind11::module_& m);

}  // namespace ktft
