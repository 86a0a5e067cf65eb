#include "runtime/runtime.h"

#include <utility>

#include "base/cpu.h"

namespace ktft {

Runtime::Runtime(Isa isa, Topology topology, std::vector<int> node_ids, const std::vector<std::vector<int>>& cpus,
                 const std::vector<int>& threads)
    : isa(isa),
      topology(std::move(topology)),
      node_ids(std::move(node_ids)),
      pool(cpus, threads),
      scratch(pool.threads()) {}

std::shared_ptr<Runtime> Runtime::create(Isa isa, int threads, int nodes) {
  require_isa(isa);
  Topology topology = read_topology();
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
  return std::shared_ptr<Runtime>(new Runtime(isa, std::move(topology), ids, cpus, counts));
}

PhaseTimes Runtime::take_phases() {
  const ForkLock lock(mutex);
  return std::exchange(phases, {});
}

}  // namespace ktft
