#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/fork.h"

namespace ktft {

// Owns zeroed memory. Large buffers are aligned to 2 MB and may use transparent huge pages. Pages are placed on `node`
// when first touched, elsewhere only if it is full; node < 0 leaves the choice to Linux. Throws OutOfMemory.
class NodeBuffer {
 public:
  NodeBuffer() = default;
  NodeBuffer(size_t bytes, int node);

  char* data() const { return data_.get(); }
  size_t size() const { return data_ ? size_ : 0; }
  int node() const { return node_; }

 private:
  struct Unmap {
    void* map;
    size_t bytes;
    void operator()(char*) const;
  };
  std::unique_ptr<char, Unmap> data_;
  size_t size_ = 0;
  int node_ = -1;
};

// Lets Linux use transparent huge pages where they fit whole. Weights are read at up to 1.25 times the rate then.
void prefer_huge_pages(void* at, size_t bytes);

// The same for memory that has been written. An allocator hands out memory that was used before in small pages, whose
// size stays what it was. From Linux 6.1 on; before, nothing changes.
void collapse_huge_pages(void* at, size_t bytes);

// Buffers needed for a while in every step. They are used again, since fresh memory costs a fault for every page. The
// memory held never exceeds the most that was in use at one time.
class BufferPool {
 public:
  // Returns at least `bytes` on `node`. The content is undefined.
  NodeBuffer take(size_t bytes, int node);
  void give(NodeBuffer buffer);

 private:
  ForkMutex mutex_;
  std::vector<NodeBuffer> free_;
};

// "ok", or why the operating system refuses to place memory on a node, which is common in containers.
std::string node_binding_status();

}  // namespace ktft
