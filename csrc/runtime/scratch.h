// Memory that is allocated once and used again by every call.
#pragma once

#include "base/check.h"
#include "numa/buffer.h"

namespace ktft {

// A buffer that only grows. Its content is undefined after get().
class Growing {
 public:
  template <class T>
  T* get(size_t bytes, int node = -1) {
    if (bytes > buffer_.size()) {
      buffer_ = NodeBuffer();  // released before the larger one is taken, so that the peak is not their sum
      buffer_ = NodeBuffer(bytes, node);
    }
    return reinterpret_cast<T*>(buffer_.data());
  }
  size_t bytes() const { return buffer_.size(); }

 private:
  NodeBuffer buffer_;
};

// One thread's memory within one task. take() hands out pieces; reset() takes back all of them, or those taken since
// used() returned `to`.
class Scratch {
 public:
  void reserve(size_t bytes) { memory_.get<char>(bytes); }
  void reset(size_t to = 0) { used_ = to; }
  size_t used() const { return used_; }
  size_t bytes() const { return memory_.bytes(); }
  template <class T>
  T* take(size_t count) {
    const size_t at = used_;
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    KTFT_CHECK(used_ <= memory_.bytes(), "internal error: scratch of ", memory_.bytes(), " bytes is too small for ",
               used_);
    return reinterpret_cast<T*>(memory_.get<char>(0) + at);
  }

 private:
  Growing memory_;
  size_t used_ = 0;
};

}  // namespace ktft
