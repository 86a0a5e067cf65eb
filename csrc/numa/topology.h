// The CPUs and memory nodes this process may use: hardware, affinity mask and cgroup limits together.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ktft {

struct Node {
  int id;                 // the kernel's number
  std::vector<int> cpus;  // allowed ones
  int cores;              // physical cores among them
  int64_t memory_bytes, free_bytes;
};

struct Topology {
  std::vector<Node> nodes;  // at least one, each with at least one CPU
  double cgroup_cpus;       // CPU quota in CPUs; 0 when there is none

  int cores() const;  // physical cores, no more than the quota allows; at least 1
};

Topology read_topology();

}  // namespace ktft
