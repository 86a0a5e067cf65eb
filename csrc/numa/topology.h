// The CPUs and memory nodes that this process may use, given the hardware, the affinity mask and cgroup limits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ktft {

struct Node {
  int id;                 // the operating system's number
  std::vector<int> cpus;  // those that this process may use
  int cores;              // physical cores among them
  int64_t memory_bytes, free_bytes;
};

struct Topology {
  std::vector<Node> nodes;  // at least one, each with at least one CPU
  double cgroup_cpus;       // CPU quota in CPUs; 0 if there is none

  int cores() const;  // physical cores, no more than the quota allows; at least 1
};

Topology read_topology();

}  // namespace ktft
