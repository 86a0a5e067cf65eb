#include "numa/buffer.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "numa/limits.h"

namespace ktft {
namespace {

constexpr size_t kPage = 4096, kHugePage = size_t(2) << 20;

// The node is preferred, not required: if it is full, the process gets slower instead of being killed.
int prefer_node(void* at, size_t bytes, int node) {
  constexpr int kPreferred = 1, kMaskBits = 1024;
  unsigned long mask[kMaskBits / (8 * sizeof(unsigned long))] = {};
  if (node >= kMaskBits) return EINVAL;
  mask[size_t(node) / (8 * sizeof(unsigned long))] |= 1ul << (size_t(node) % (8 * sizeof(unsigned long)));
  return syscall(SYS_mbind, at, bytes, kPreferred, mask, kMaskBits, 0) == 0 ? 0 : errno;
}

void advise_huge_pages(void* at, size_t bytes, int advice) {
  const uintptr_t begin = (uintptr_t(at) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (uintptr_t(at) + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, advice);
}

}  // namespace

void prefer_huge_pages(void* at, size_t bytes) { advise_huge_pages(at, bytes, MADV_HUGEPAGE); }

void collapse_huge_pages(void* at, size_t bytes) {
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers do not name
  advise_huge_pages(at, bytes, kCollapse);
}

void NodeBuffer::Unmap::operator()(char*) const { munmap(map, bytes); }

NodeBuffer::NodeBuffer(size_t bytes, int node) : size_(bytes), node_(node) {
  if (bytes == 0) return;
  const bool large = bytes >= kHugePage;
  const size_t mapped = (bytes + kPage - 1) / kPage * kPage + (large ? kHugePage : 0);
  void* const map = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) throw OutOfMemory(bytes);
  const uintptr_t unit = large ? kHugePage : kPage, at = (uintptr_t(map) + unit - 1) / unit * unit;
  data_ = {reinterpret_cast<char*>(at), Unmap{map, mapped}};
  if (large) prefer_huge_pages(data(), mapped - (at - uintptr_t(map)));
  if (node >= 0) prefer_node(map, mapped, node);
}

NodeBuffer BufferPool::take(size_t bytes, int node) {
  const ForkLock lock(mutex_);
  int best = -1, smallest = -1;
  for (int i = 0; i < int(free_.size()); i++) {
    if (free_[i].node() != node) continue;
    const size_t size = free_[i].size();
    if (size >= bytes && size <= 2 * bytes && (best < 0 || size < free_[best].size())) best = i;
    if (smallest < 0 || size < free_[smallest].size()) smallest = i;
  }
  NodeBuffer found;
  const int leaves = best >= 0 ? best : smallest;  // if none fits, one is released to make room for the new one
  if (leaves >= 0) {
    found = std::move(free_[leaves]);
    free_.erase(free_.begin() + leaves);
  }
  if (best >= 0) return found;
  found = NodeBuffer();
  return NodeBuffer(bytes, node);
}

void BufferPool::give(NodeBuffer buffer) {
  if (buffer.size() == 0) return;
  const ForkLock lock(mutex_);
  free_.push_back(std::move(buffer));
}

std::string node_binding_status() {
  void* page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return std::strerror(errno);
  const int error = prefer_node(page, kPage, 0);
  munmap(page, kPage);
  return error ? std::strerror(error) : "ok";
}

}  // namespace ktft
