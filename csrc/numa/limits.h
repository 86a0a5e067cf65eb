// Error messages for threads and memory that the system refuses, with the limits that apply to this process.
#pragma once

#include <new>
#include <string>
#include <thread>

namespace ktft {

// Python raises MemoryError with this text.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes) noexcept;
  const char* what() const noexcept override { return text_; }

 private:
  char text_[256];  // this exception must not need memory itself
};

// Starts a thread. If the system refuses it, throws an error: `what`, the limits of this process, then `cure`.
[[noreturn]] void thread_refused(const std::string& what, const char* why, const std::string& cure);
template <class Body>
std::thread start_thread(const std::string& what, const std::string& cure, Body body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::exception& error) {
    thread_refused(what, error.what(), cure);
  }
}

}  // namespace ktft
