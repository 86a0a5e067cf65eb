#include "moe/workspace.h"

#include "base/cpu.h"

namespace ktft {

Runtime::Runtime(Isa isa, Topology topology, std::vector<int> node_ids, const std::vector<std::vector<int>>& cpus,
                 const std::vector<int>& threads)
    : isa(isa),
      topology(std::move(topology)),
      node_ids(std::move(node_ids)),
      pool(cpus, threads),
      scratch(pool.threads()),
      expert_memory(pool.threads()) {
  workspace.nodes.resize(pool.nodes());
}

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

size_t Runtime::workspace_bytes() const {
  size_t total = 0;
  const auto add = [&](const auto& buffers) {
    for (const auto& b : buffers) total += b.bytes();
  };
  for (const Growing* g : {&workspace.x, &workspace.dy, &workspace.x_codes, &workspace.x_scales, &workspace.lora,
                           &workspace.bias_dots, &workspace.transposed})
    total += g->bytes();
  add(workspace.low_rank);
  add(workspace.low_rank_operand);
  for (const NodeWorkspace& n : workspace.nodes) {
    for (const Growing* g : {&n.gate, &n.up, &n.h, &n.h_codes, &n.h_scales, &n.y, &n.weight_grads}) total += g->bytes();
    add(n.grad);
    add(n.low_rank);
    add(n.low_rank_operand);
  }
  add(scratch);
  add(expert_memory);
  return total;
}

}  // namespace ktft
