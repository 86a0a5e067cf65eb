#include "numa/topology.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>

namespace ktft {
namespace {

std::vector<std::string> split_text(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(separator, at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

// Empty when the file cannot be read.
std::vector<std::string> lines(const std::string& path) {
  std::string text;
  if (std::FILE* file = std::fopen(path.c_str(), "r")) {
    char part[4096];
    for (size_t n; (n = std::fread(part, 1, sizeof part, file)) > 0;) text.append(part, n);
    std::fclose(file);
  }
  return split_text(text, '\n');
}

std::string first_line(const std::string& path) {
  const std::vector<std::string> all = lines(path);
  return all.empty() ? "" : all[0];
}

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
  for (int size = 1024; size <= 1 << 16; size *= 4) {  // a larger machine needs a larger mask
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
  for (const std::string& line : lines("/proc/self/status"))
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
    std::string siblings = first_line(dir + "core_cpus_list");
    if (siblings.empty()) siblings = first_line(dir + "thread_siblings_list");
    cores.insert(siblings.empty() ? std::to_string(cpu) : siblings);
  }
  return int(cores.size());
}

int64_t meminfo(const std::string& path, const std::string& key) {
  for (const std::string& line : lines(path)) {
    const size_t at = line.find(key + ":");
    if (at != std::string::npos) return std::atoll(line.c_str() + at + key.size() + 1) * 1024;
  }
  return 0;
}

double quota_of(const std::string& dir) {
  double quota = 0, period = 0;
  if (std::sscanf(first_line(dir + "/cpu.max").c_str(), "%lf %lf", &quota, &period) == 2 && period > 0)
    return quota / period;
  quota = std::atof(first_line(dir + "/cpu.cfs_quota_us").c_str());
  period = std::atof(first_line(dir + "/cpu.cfs_period_us").c_str());
  return quota > 0 && period > 0 ? quota / period : 0;
}

// The tightest quota of this process's group and the groups above it (cgroup v2, then v1).
double read_quota() {
  double tightest = 0;
  const auto consider = [&](const std::string& dir) {
    const double quota = quota_of(dir);
    if (quota > 0 && (tightest == 0 || quota < tightest)) tightest = quota;
  };
  for (const std::string& line : lines("/proc/self/cgroup")) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && controllers.find("cpu") == std::string::npos) continue;
    const std::string root = controllers.empty() ? "/sys/fs/cgroup" : "/sys/fs/cgroup/" + controllers;
    for (std::string path = line.substr(second + 1); !path.empty(); path = path.substr(0, path.rfind('/')))
      consider(root + path);
    consider(root);
  }
  consider("/sys/fs/cgroup");
  consider("/sys/fs/cgroup/cpu");
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
  const std::set<int> cpus = allowed_cpus(), mems = allowed_nodes();
  const std::string base = "/sys/devices/system/node/node";
  for (int id : parse_list(first_line("/sys/devices/system/node/online"))) {
    const std::string dir = base + std::to_string(id);
    Node node{id, {}, 0, meminfo(dir + "/meminfo", "MemTotal"), meminfo(dir + "/meminfo", "MemFree")};
    for (int cpu : parse_list(first_line(dir + "/cpulist")))
      if (cpus.count(cpu)) node.cpus.push_back(cpu);
    if (node.cpus.empty() || !mems.count(id)) continue;
    node.cores = count_cores(node.cpus);
    topology.nodes.push_back(node);
  }
  if (topology.nodes.empty()) {  // no sysfs: one node with every allowed CPU
    Node node{
        0, {cpus.begin(), cpus.end()}, 0, meminfo("/proc/meminfo", "MemTotal"), meminfo("/proc/meminfo", "MemFree")};
    node.cores = count_cores(node.cpus);
    topology.nodes.push_back(node);
  }
  return topology;
}

}  // namespace ktft
