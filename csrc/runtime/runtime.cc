#include "runtime/runtime.h"

#include "base/cpu.h"
#include "numa/topology.h"

namespace ktft {

Phase::~Phase() {
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  for (auto& [name, sum] : times_)
    if (name == name_) {
      sum += seconds;
      return;
    }
  times_.emplace_back(name_, seconds);
}

std::shared_ptr<Runtime> Runtime::create(Isa isa, int threads, int nodes) {
  require_isa(isa);
  const Topology topology = read_topology();
  const int real = int(topology.nodes.size()), wanted = nodes > 0 ? nodes : real;
  const int total = threads > 0 ? threads : topology.cores();
  std::vector<int> ids, counts;
  std::vector<std::vector<int>> cpus;
  for (int n = 0; n < wanted; n++) {
    const Node& node = topology.nodes[n % real];
    ids.push_back(real > 1 ? node.id : -1);
    cpus.push_back(node.cpus);
    counts.push_back(split(total, wanted, n + 1) - split(total, wanted, n));
  }
  if (counts[0] == 0) {  // fewer threads than nodes: the calling thread is node 0's, and helps the others
    counts.assign(wanted, 0);
    for (int i = 0; i < total; i++) counts[i]++;
  }
  return std::shared_ptr<Runtime>(new Runtime(isa, ids, cpus, counts));
}

PhaseTimes Runtime::take_phases() {
  const ForkLock lock(mutex);
  return std::exchange(phases, {});
}

}  // namespace ktft
