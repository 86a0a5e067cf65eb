// CUDA's driver, opened at run time, so that one build works with and without a GPU and needs nothing of CUDA. Names
// and types are those of the CUDA Driver API Reference Manual.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/rows.h"

namespace ktft {

// An error of the driver, with the driver's own name and text for it.
class CudaError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class CopyDirection { kToDevice, kToHost };

// Any thread may use it. Each call makes the primary context of its device current, which is the one that torch uses,
// and then restores the thread's previous context, if it had one.
class CudaDriver {
 public:
  // Opens the library and initializes the driver. Throws CudaError, which says what is missing.
  explicit CudaDriver(const std::string& library);

  int devices() const { return int(contexts_.size()); }

  // Locks host memory in place, so that devices copy it asynchronously at full rate, and access it if `mapped`.
  void register_host(int device, uintptr_t address, size_t bytes, bool mapped = false);
  void unregister_host(int device, uintptr_t address);

  // Enqueues copies on a stream (a raw handle) of the device and returns their number. Both sides must stay valid and
  // unchanged until the stream has passed.
  int copy(int device, CopyDirection direction, const std::vector<int>& rows, const std::vector<RowCopy>& matrices,
           uintptr_t stream);

  // Enqueues fn(data) on the host, for whose return later work in the stream waits. It must not throw or call CUDA.
  void call_host(int device, void (*fn)(void*), void* data, uintptr_t stream);

  // The device's address of mapped memory.
  uintptr_t device_address(int device, const void* mapped);
  // Whether the device's streams can read and write words of mapped memory.
  bool has_words(int device);
  // Enqueues writing a word at a device address. The host sees all earlier work of the stream before it.
  void write_word(int device, uintptr_t word, uint32_t value, uintptr_t stream);
  // Makes later work in the stream wait until the word has the value.
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
  int (*call_host_)(void*, void (*)(void*), void*);
  int (*device_pointer_)(unsigned long long*, void*, unsigned);
  int (*attribute_)(int*, int, int);
  // Null if the driver is too old to have them
  int (*write_value_)(void*, unsigned long long, uint32_t, unsigned);
  int (*wait_value_)(void*, unsigned long long, uint32_t, unsigned);
  std::mutex mutex_;
  std::vector<Context> contexts_;  // primary contexts, retained at first use
  std::vector<int> handles_;       // CUdevice by ordinal
};

}  // namespace ktft
