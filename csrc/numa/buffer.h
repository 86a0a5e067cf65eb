// Memory on one NUMA node.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/fork.h"

namespace ktft {

// Owns zeroed memory. Large buffers are aligned to 2 MB and may use transparent huge pages. Pages are placed on `node`
// when they are first touched, on another node only if that one is full. node < 0 leaves the choice to the operating
// system. Throws OutOfMemory.
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

// Buffers that are needed for a while in every step. Returned buffers are used again, since fresh memory costs a page
// fault for every page. The memory held never exceeds the most that was in use at one time.
class BufferPool {
 public:
  // Returns at least `bytes` on `node`. The content is undefined.
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

// "ok", or why the operating system refuses to place memory on a node, which is common in containers.
std::string node_binding_status();

}  // namespace ktft
