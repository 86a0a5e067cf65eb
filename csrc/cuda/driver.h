// CUDA's driver, opened when it is first asked for: one build serves machines with and without a GPU. Names and types
// are those of the CUDA Driver API Reference Manual; no CUDA header or library is needed to build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/rows.h"

namespace ktft {

// What the driver refused, by its own name and text.
class CudaError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class CopyDirection { kToDevice, kToHost, kOnDevice };

// Copies, registrations of memory and calls of the host in stream order. Any thread may call: each call makes the
// primary context of its device current, the one that torch uses, and leaves the thread's own afterwards as it was, if
// it had one.
class CudaDriver {
 public:
  // Opens the library and initializes the driver. Throws CudaError, which says what is missing.
  explicit CudaDriver(const std::string& library);
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;

  int devices() const { return int(contexts_.size()); }

  // Locks host memory where it lies, so that copies of it run asynchronously at full rate, for every device; `mapped`:
  // the device can read it.
  void register_host(int device, uintptr_t address, size_t bytes, bool mapped = false);
  void unregister_host(int device, uintptr_t address);

  // Begins copies on a stream (a raw handle) of the device, in order; returns how many there were. Nothing is awaited:
  // both sides must stay as they are until the stream has passed.
  int copy(int device, CopyDirection direction, const std::vector<int>& rows, const std::vector<RowCopy>& matrices,
           uintptr_t stream);

  // Has the host call fn(data) once the stream is there; what comes after it in the stream waits for it to return. It
  // must neither throw nor call CUDA.
  void call_host(int device, void (*fn)(void*), void* data, uintptr_t stream);

  // Where the device sees mapped memory.
  uintptr_t device_address(int device, const void* mapped);
  // Whether the device's streams read and write words of mapped memory.
  bool has_words(int device);
  // Once the stream is there, and all before it is seen by the host, the word at a device address gets the value.
  void write_word(int device, uintptr_t word, uint32_t value, uintptr_t stream);
  // What comes after it in the stream waits until the word has the value.
  void wait_for_word(int device, uintptr_t word, uint32_t value, uintptr_t stream);

 private:
  using Context = void*;
  class Current;
  Context primary(int device);
  void check(int result, const std::string& call) const;

  int (*error_name_)(int, const char**);
  int (*error_string_)(int, const char**);
  int (*primary_retain_)(Context*, int);
  int (*get_current_)(Context*);
  int (*set_current_)(Context);
  int (*host_register_)(void*, size_t, unsigned);
  int (*host_unregister_)(void*);
  int (*to_device_)(unsigned long long, const void*, size_t, void*);
  int (*to_host_)(void*, unsigned long long, size_t, void*);
  int (*on_device_)(unsigned long long, unsigned long long, size_t, void*);
  int (*call_host_)(void*, void (*)(void*), void*);
  int (*device_pointer_)(unsigned long long*, void*, unsigned);
  int (*attribute_)(int*, int, int);
  // Null where the driver is older than they are
  int (*write_value_)(void*, unsigned long long, uint32_t, unsigned);
  int (*wait_value_)(void*, unsigned long long, uint32_t, unsigned);
  std::mutex mutex_;
  std::vector<Context> contexts_;  // primary ones, retained at first use
  std::vector<int> handles_;       // CUdevice by ordinal
};

}  // namespace ktft
