// What the system refuses, for a person: threads and memory, with the limits that this process is under.
#pragma once

#include <new>
#include <string>
#include <thread>

namespace ktft {

[[noreturn]] void thread_refused(const std::string& what, const char* why, const std::string& cure);

// Memory that was refused, which Python shows as MemoryError with this text.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes) noexcept;
  const char* what() const noexcept override { return text_; }

 private:
  char text_[256];  // an exception for this must not need memory
};

// Starts a thread. Throws std::runtime_error when the system refuses one: the message begins with `what`, lists the
// limits that this process is under, and ends with `cure`, the alternative to raising them.
template <class Body>
std::thread start_thread(const std::string& what, const std::string& cure, Body body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::exception& error) {
    thread_refused(what, error.what(), cure);
  }
}

}  // namespace ktft
