#include "bind/bind.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "ktft's native core; import ktft.native instead";
  ktft::bind_system(m);
  ktft::bind_quant(m);
  ktft::bind_moe(m);
  ktft::bind_optim(m);
  ktft::bind_bench(m);
  ktft::bind_cuda(m);
  ktft::bind_hybrid(m);
}
