// What Linux says in files, and the control groups that this process is in.
#pragma once

#include <string>
#include <vector>

namespace ktft {

std::vector<std::string> split_text(const std::string& text, char separator);

// Empty when the file cannot be read.
std::vector<std::string> lines_of(const std::string& path);
std::string first_line_of(const std::string& path);

// The folders of a controller's group for this process and of the groups above it, the innermost first (cgroup v2,
// then v1). They need not exist.
std::vector<std::string> cgroup_folders(const std::string& controller);

}  // namespace ktft
