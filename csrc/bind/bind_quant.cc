#include <pybind11/stl.h>

#include "bind/bind.h"
#include "quant/codes.h"

namespace py = pybind11;

namespace ktft {
namespace {

py::dict format_row(Format format) {
  const FormatInfo& f = info(format);
  const CodeTable table = code_table(format);
  return py::dict(py::arg("name") = f.name, py::arg("tile_cols") = f.tile_cols, py::arg("tile_bytes") = f.tile_bytes,
                  py::arg("row_scaled") = f.row_scaled, py::arg("block_scaled") = f.block_scaled,
                  py::arg("codes") = table.codes, py::arg("values") = py::tuple(py::cast(table.values)),
                  py::arg("unit") = table.unit, py::arg("group_scales") = table.group_scales,
                  py::arg("multipliers") = py::tuple(py::cast(table.multipliers)));
}

}  // namespace

void bind_quant(py::module_& m) {
  m.attr("TILE_ROWS") = kTileRows;
  m.attr("ROW_BYTES") = kRowBytes;
  m.attr("GROUP") = kGroup;
  m.attr("SCALE_BLOCK") = kScaleBlock;
  py::list rows;
  for (int i = 0; i < kFormats; i++) rows.append(format_row(Format(i)));
  m.attr("FORMAT_ROWS") = py::tuple(rows);
}

}  // namespace ktft
