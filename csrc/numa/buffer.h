// Memory that lives on one NUMA node.
#pragma once

#include <cstddef>
#include <string>

namespace ktft {

// Zeroed, 2 MB aligned when it is large (and then offered to transparent huge pages), owned. Pages are placed on
// `node` when they are first touched, on another node only if that one is full; node < 0 leaves the choice to the
// kernel. Throws std::bad_alloc.
class NodeBuffer {
 public:
  NodeBuffer() = default;
  NodeBuffer(size_t bytes, int node);
  NodeBuffer(NodeBuffer&& other) noexcept;
  NodeBuffer& operator=(NodeBuffer&& other) noexcept;
  ~NodeBuffer();

  char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  char* data_ = nullptr;
  char* map_ = nullptr;
  size_t size_ = 0, map_size_ = 0;
};

// "ok", or why the kernel refuses to place memory on a node (containers often do).
std::string node_binding_status();

}  // namespace ktft
