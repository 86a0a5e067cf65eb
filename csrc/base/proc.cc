#include "base/proc.h"

#include <algorithm>
#include <cstdio>

namespace ktft {

std::vector<std::string> split_text(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(separator, at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

std::vector<std::string> lines_of(const std::string& path) {
  std::string text;
  if (std::FILE* file = std::fopen(path.c_str(), "re")) {
    char part[4096];
    for (size_t n; (n = std::fread(part, 1, sizeof part, file)) > 0;) text.append(part, n);
    std::fclose(file);
  }
  return split_text(text, '\n');
}

std::string first_line_of(const std::string& path) {
  const std::vector<std::string> all = lines_of(path);
  return all.empty() ? "" : all[0];
}

std::vector<std::string> cgroup_folders(const std::string& controller) {
  std::vector<std::string> folders;
  for (const std::string& line : lines_of("/proc/self/cgroup")) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && controllers.find(controller) == std::string::npos) continue;
    const std::string root = controllers.empty() ? "/sys/fs/cgroup" : "/sys/fs/cgroup/" + controllers;
    for (std::string path = line.substr(second + 1); !path.empty(); path = path.substr(0, path.rfind('/')))
      folders.push_back(root + path);
    folders.push_back(root);
  }
  folders.push_back("/sys/fs/cgroup");
  folders.push_back("/sys/fs/cgroup/" + controller);
  return folders;
}

}  // namespace ktft
