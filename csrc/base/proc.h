// Reads Linux's files about the process and the machine, and finds the control groups that this process is in.
#pragma once

#include <string>
#include <vector>

namespace ktft {

std::vector<std::string> split_text(const std::string& text, char separator);

// Empty when the file cannot be read.
std::vector<std::string> lines_of(const std::string& path);
std::string first_line_of(const std::string& path);

// Folders of this process's group for a controller and of those above it, innermost first; they need not exist.
std::vector<std::string> cgroup_folders(const std::string& controller);

}  // namespace ktft
