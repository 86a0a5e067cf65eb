#include "numa/topology.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "base/proc.h"

namespace ktft {
namespace {

// "0-3,8,10-11" -> numbers
std::vector<int> parse_list(const std::string& text) {
  std::vector<int> out;
  for (const std::string& part : split_text(text, ',')) {
    int first = 0, last = 0;
    const int n = std::sscanf(part.c_str(), "%d-%d", &first, &last);
    if (n < 1) continue;
    for (int i = first; i <= (n == 2 ? last : first); i++) out.push_back(i);
  }
  return out;
}

std::set<int> allowed_cpus() {
  std::set<int> cpus;
  for (int size = 1024; size <= 1 << 16; size *= 4) {  // larger machines need a larger mask
    cpu_set_t* mask = CPU_ALLOC(size);
    const size_t bytes = CPU_ALLOC_SIZE(size);
    const bool ok = sched_getaffinity(0, bytes, mask) == 0;
    for (int i = 0; ok && i < size; i++)
      if (CPU_ISSET_S(i, bytes, mask)) cpus.insert(i);
    CPU_FREE(mask);
    if (ok) return cpus;
  }
  for (long i = 0; i < sysconf(_SC_NPROCESSORS_ONLN); i++) cpus.insert(int(i));
  return cpus;
}

std::set<int> allowed_nodes() {
  for (const std::string& line : lines_of("/proc/self/status"))
    if (line.rfind("Mems_allowed_list:", 0) == 0) {
      const std::vector<int> ids = parse_list(line.substr(line.find(':') + 1));
      return {ids.begin(), ids.end()};
    }
  return {0};
}

int count_cores(const std::vector<int>& cpus) {
  std::set<std::string> cores;
  for (int cpu : cpus) {
    const std::string dir = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    std::string siblings = first_line_of(dir + "core_cpus_list");
    if (siblings.empty()) siblings = first_line_of(dir + "thread_siblings_list");
    cores.insert(siblings.empty() ? std::to_string(cpu) : siblings);
  }
  return int(cores.size());
}

int64_t meminfo(const std::string& path, const std::string& key) {
  for (const std::string& line : lines_of(path)) {
    const size_t at = line.find(key + ":");
    if (at != std::string::npos) return std::atoll(line.c_str() + at + key.size() + 1) * 1024;
  }
  return 0;
}

double quota_of(const std::string& dir) {
  double quota = 0, period = 0;
  if (std::sscanf(first_line_of(dir + "/cpu.max").c_str(), "%lf %lf", &quota, &period) == 2 && period > 0)
    return quota / period;
  quota = std::atof(first_line_of(dir + "/cpu.cfs_quota_us").c_str());
  period = std::atof(first_line_of(dir + "/cpu.cfs_period_us").c_str());
  return quota > 0 && period > 0 ? quota / period : 0;
}

// The smallest quota of this process's group and the groups above it (cgroup v2, then v1).
double read_quota() {
  double tightest = 0;
  for (const std::string& folder : cgroup_folders("cpu")) {
    const double quota = quota_of(folder);
    if (quota > 0 && (tightest == 0 || quota < tightest)) tightest = quota;
  }
  return tightest;
}

}  // namespace

int Topology::cores() const {
  int total = 0;
  for (const Node& node : nodes) total += node.cores;
  if (cgroup_cpus > 0) total = std::min(total, int(cgroup_cpus + 0.5));
  return std::max(total, 1);
}

Topology read_topology() {
  Topology topology{{}, read_quota()};
  const std::set<int> allowed = allowed_cpus(), mems = allowed_nodes();
  const auto add = [&](int id, const std::vector<int>& cpus, const std::string& memory) {
    topology.nodes.push_back({.id = id,
                              .cpus = cpus,
                              .cores = count_cores(cpus),
                              .memory_bytes = meminfo(memory, "MemTotal"),
                              .free_bytes = meminfo(memory, "MemFree")});
  };
  for (int id : parse_list(first_line_of("/sys/devices/system/node/online"))) {
    const std::string dir = "/sys/devices/system/node/node" + std::to_string(id);
    std::vector<int> cpus;
    for (int cpu : parse_list(first_line_of(dir + "/cpulist")))
      if (allowed.count(cpu)) cpus.push_back(cpu);
    if (!cpus.empty() && mems.count(id)) add(id, cpus, dir + "/meminfo");
  }
  // Without sysfs: one node with all allowed CPUs
  if (topology.nodes.empty()) add(0, {allowed.begin(), allowed.end()}, "/proc/meminfo");
  return topology;
}

}  // namespace ktft
