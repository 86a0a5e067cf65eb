// What the files of bindings share. The bindings name and convert arguments, nothing else. Arrays arrive as addresses
// that ktft/native/ has checked.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "quant/encoding.h"

namespace ktft {

namespace py = pybind11;
using namespace pybind11::literals;

using Address = uintptr_t;
using NoGil = py::call_guard<py::gil_scoped_release>;

template <class T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

inline SourceMatrix source_of(Address data, Encoding encoding, int rows, int cols, Address scales, int block_rows,
                              int block_cols, Address zeros) {
  return {.data = at(data),
          .encoding = encoding,
          .rows = rows,
          .cols = cols,
          .scales = at(scales),
          .block_rows = block_rows,
          .block_cols = block_cols,
          .zeros = at<uint8_t>(zeros)};
}

}  // namespace ktft
