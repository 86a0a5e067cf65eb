#include "cuda/driver.h"

#include <dlfcn.h>

#include <array>
#include <cstdio>

namespace ktft {
namespace {

std::string hex(uintptr_t address) {
  std::array<char, 24> text;
  std::snprintf(text.data(), text.size(), "0x%llx", static_cast<unsigned long long>(address));
  return text.data();
}

template <class Fn>
void resolve(void* handle, const std::string& library, const char* name, Fn& fn) {
  fn = reinterpret_cast<Fn>(dlsym(handle, name));
  if (!fn) throw CudaError(library + " has no function " + name + ": the driver is too old, or this is not CUDA's");
}

}  // namespace

// Makes the device's primary context current in this thread during its lifetime.
class CudaDriver::Current {
 public:
  Current(CudaDriver& driver, int device) : driver_(driver) {
    if (device < 0 || device >= driver.devices())
      throw CudaError("there is no CUDA device " + std::to_string(device) + ", the driver has " +
                      std::to_string(driver.devices()));
    const Context context = driver.primary(device);
    driver.check(driver.get_current_(&before_), "cuCtxGetCurrent");
    changed_ = before_ != context;
    if (changed_) driver.check(driver.set_current_(context), "cuCtxSetCurrent");
  }
  ~Current() {
    if (changed_ && before_) driver_.set_current_(before_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  CudaDriver& driver_;
  Context before_ = nullptr;
  bool changed_ = false;
};

CudaDriver::CudaDriver(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* why = dlerror();
    throw CudaError("CUDA's driver cannot be opened: " + std::string(why ? why : library));
  }
  int (*init)(unsigned), (*count)(int*), (*get)(int*, int);
  resolve(handle, library, "cuInit", init);
  resolve(handle, library, "cuDeviceGetCount", count);
  resolve(handle, library, "cuDeviceGet", get);
  resolve(handle, library, "cuGetErrorName", error_name_);
  resolve(handle, library, "cuGetErrorString", error_string_);
  resolve(handle, library, "cuDevicePrimaryCtxRetain", primary_retain_);
  resolve(handle, library, "cuCtxGetCurrent", get_current_);
  resolve(handle, library, "cuCtxSetCurrent", set_current_);
  resolve(handle, library, "cuMemHostRegister_v2", host_register_);
  resolve(handle, library, "cuMemHostUnregister", host_unregister_);
  resolve(handle, library, "cuMemcpyHtoDAsync_v2", to_device_);
  resolve(handle, library, "cuMemcpyDtoHAsync_v2", to_host_);
  resolve(handle, library, "cuLaunchHostFunc", call_host_);
  resolve(handle, library, "cuMemHostGetDevicePointer_v2", device_pointer_);
  resolve(handle, library, "cuDeviceGetAttribute", attribute_);
  write_value_ = reinterpret_cast<decltype(write_value_)>(dlsym(handle, "cuStreamWriteValue32_v2"));
  wait_value_ = reinterpret_cast<decltype(wait_value_)>(dlsym(handle, "cuStreamWaitValue32_v2"));
  check(init(0), "cuInit");
  int devices = 0;
  check(count(&devices), "cuDeviceGetCount");
  if (devices == 0) throw CudaError("CUDA's driver finds no device");
  contexts_.resize(devices);
  handles_.resize(devices);
  for (int i = 0; i < devices; i++) check(get(&handles_[i], i), "cuDeviceGet");
}

void CudaDriver::check(int result, const std::string& call) const {
  if (result == 0) return;
  const char *name = nullptr, *text = nullptr;
  error_name_(result, &name);
  error_string_(result, &text);
  throw CudaError(call + " failed: " + (name ? name : "error " + std::to_string(result)) +
                  (text ? std::string(" (") + text + ")" : ""));
}

CudaDriver::Context CudaDriver::primary(int device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Context& context = contexts_[device];  // never released; torch keeps it until the process ends too
  if (!context) check(primary_retain_(&context, handles_[device]), "cuDevicePrimaryCtxRetain");
  return context;
}

void CudaDriver::register_host(int device, uintptr_t address, size_t bytes, bool mapped) {
  constexpr unsigned kPortable = 1, kDeviceMap = 2;  // CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP
  const Current current(*this, device);
  check(host_register_(reinterpret_cast<void*>(address), bytes, kPortable | (mapped ? kDeviceMap : 0)),
        "cuMemHostRegister of " + std::to_string(bytes) + " bytes at " + hex(address));
}

void CudaDriver::unregister_host(int device, uintptr_t address) {
  const Current current(*this, device);
  check(host_unregister_(reinterpret_cast<void*>(address)), "cuMemHostUnregister of " + hex(address));
}

int CudaDriver::copy(int device, CopyDirection direction, const std::vector<int>& rows,
                     const std::vector<RowCopy>& matrices, uintptr_t stream) {
  const Current current(*this, device);
  void* const on = reinterpret_cast<void*>(stream);
  const std::vector<Piece> all = pieces(rows, matrices);
  for (size_t i = 0; i < all.size(); i++) {
    const Piece& p = all[i];
    const bool out = direction == CopyDirection::kToHost;
    const int result = out ? to_host_(reinterpret_cast<void*>(p.all), p.chosen, p.bytes, on)
                           : to_device_(p.chosen, reinterpret_cast<const void*>(p.all), p.bytes, on);
    if (result == 0) continue;
    const char* const name = out ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync";
    const uintptr_t from = out ? p.chosen : p.all, to = out ? p.all : p.chosen;
    check(result, std::string(name) + " of " + std::to_string(p.bytes) + " bytes from " + hex(from) + " to " + hex(to) +
                      " (copy " + std::to_string(i + 1) + " of " + std::to_string(all.size()) + ")");
  }
  return int(all.size());
}

void CudaDriver::call_host(int device, void (*fn)(void*), void* data, uintptr_t stream) {
  const Current current(*this, device);
  check(call_host_(reinterpret_cast<void*>(stream), fn, data), "cuLaunchHostFunc");
}

uintptr_t CudaDriver::device_address(int device, const void* mapped) {
  const Current current(*this, device);
  unsigned long long at = 0;
  check(device_pointer_(&at, const_cast<void*>(mapped), 0), "cuMemHostGetDevicePointer");
  return at;
}

bool CudaDriver::has_words(int device) {
  // CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS; the one for 32 bits belongs to the calls' first version
  constexpr int kStreamMemoryOperations = 122;
  const Current current(*this, device);
  int can = 0;
  check(attribute_(&can, kStreamMemoryOperations, handles_[device]), "cuDeviceGetAttribute");
  return can && write_value_ && wait_value_;
}

void CudaDriver::write_word(int device, uintptr_t word, uint32_t value, uintptr_t stream) {
  constexpr unsigned kDefault = 0;  // CU_STREAM_WRITE_VALUE_DEFAULT: with a memory barrier before it
  const Current current(*this, device);
  check(write_value_(reinterpret_cast<void*>(stream), word, value, kDefault), "cuStreamWriteValue32");
}

void CudaDriver::wait_for_word(int device, uintptr_t word, uint32_t value, uintptr_t stream) {
  constexpr unsigned kEqual = 1;  // CU_STREAM_WAIT_VALUE_EQ
  const Current current(*this, device);
  check(wait_value_(reinterpret_cast<void*>(stream), word, value, kEqual), "cuStreamWaitValue32");
}

}  // namespace ktft
