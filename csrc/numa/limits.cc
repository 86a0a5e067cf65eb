#include "numa/limits.h"

#include <sys/resource.h>

#include <array>
#include <cstdio>
#include <stdexcept>

#include "base/proc.h"

namespace ktft {
namespace {

constexpr double kGiB = double(size_t(1) << 30);

double gib(rlim_t bytes) { return double(bytes) / kGiB; }

bool limited(int resource, rlim_t& limit) {
  rlimit found{};
  if (getrlimit(__rlimit_resource_t(resource), &found) != 0 || found.rlim_cur == RLIM_INFINITY) return false;
  limit = found.rlim_cur;
  return true;
}

// A value of /proc/self/status, such as "Threads" or "VmSize".
long status_of(const std::string& key) {
  for (const std::string& line : lines_of("/proc/self/status"))
    if (line.rfind(key + ":", 0) == 0) return std::atol(line.c_str() + key.size() + 1);
  return 0;
}

std::string thread_limits() {
  std::string found;
  const auto add = [&](const std::string& text) { found += (found.empty() ? "" : ", ") + text; };
  rlim_t limit = 0;
  if (limited(RLIMIT_NPROC, limit)) add("ulimit -u " + std::to_string(limit));
  if (limited(RLIMIT_AS, limit)) {
    std::array<char, 96> text;
    std::snprintf(text.data(), text.size(), "ulimit -v %.1f GiB, of which %.1f are used", gib(limit),
                  double(status_of("VmSize")) * 1024 / kGiB);
    add(text.data());
  }
  for (const std::string& folder : cgroup_folders("pids")) {
    const std::string most = first_line_of(folder + "/pids.max");
    if (most.empty() || most == "max") continue;
    add("pids.max " + most + " of the cgroup, of which " + first_line_of(folder + "/pids.current") + " are used");
    break;
  }
  add("kernel.threads-max " + first_line_of("/proc/sys/kernel/threads-max"));
  return found;
}

}  // namespace

void thread_refused(const std::string& what, const char* why, const std::string& cure) {
  throw std::runtime_error(what + " could not be started (" + why + "); this process has " +
                           std::to_string(status_of("Threads")) + " threads. Its limits: " + thread_limits() +
                           ". Raise the one that is reached" + cure);
}

OutOfMemory::OutOfMemory(size_t bytes) noexcept {
  rlim_t limit = 0;
  if (limited(RLIMIT_AS, limit))
    std::snprintf(text_, sizeof text_,
                  "%.3f GiB for the experts were refused. The limit on this process's address space, ulimit -v, is "
                  "%.1f GiB: raise it or lift it with ulimit -v unlimited",
                  double(bytes) / kGiB, gib(limit));
  else
    std::snprintf(text_, sizeof text_,
                  "%.3f GiB for the experts were refused: free memory, or choose a smaller expert_format",
                  double(bytes) / kGiB);
}

}  // namespace ktft
