// Memory that lives on one NUMA node.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/fork.h"

namespace ktft {

// Zeroed, 2 MB aligned when it is large (and then offered to transparent huge pages), owned. Pages are placed on
// `node` when they are first touched, on another node only if that one is full; node < 0 leaves the choice to the
// kernel. Throws OutOfMemory.
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

// Buffers that come and go with every step: given back ones are used again, since fresh memory costs a page fault for
// every page. What is kept never exceeds what was once in use at the same time.
class BufferPool {
 public:
  // At least `bytes` on `node`; content undefined.
  NodeBuffer take(size_t bytes, int node);
  void give(NodeBuffer buffer, int node);

 private:
  struct Free {
    int node;
    NodeBuffer buffer;
  };
  ForkMutex mutex_;
  std::vector<Free> free_;
};

// "ok", or why the kernel refuses to place memory on a node (containers often do).
std::string node_binding_status();

}  // namespace ktft
