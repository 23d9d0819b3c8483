// The part of CUDA's driver API that the emulated device uses, found at run time by its names.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace emulated {

using Pointer = unsigned long long;
using StreamHandle = void*;
using EventHandle = void*;

constexpr int kNotReady = 600;
constexpr unsigned kNonBlocking = 1;
constexpr unsigned kDisableTiming = 2;
constexpr unsigned kHostRegisterMapped = 2;
constexpr unsigned kWaitEqual = 1;
constexpr unsigned kThreadLocalCapture = 1;

inline void* symbol(const char* name) {
  // With a path, code that looks for a driver by its name does not find it.
  static const char* path = std::getenv("EMULATED_DRIVER");
  static void* library = dlopen(path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  void* found = dlsym(library, name);
  if (found == nullptr) throw std::runtime_error(std::string("the driver has no ") + name);
  return found;
}

// Calls a function of the driver; the result is its status.
template <typename... Arguments>
int status_of(const char* name, Arguments... arguments) {
  return reinterpret_cast<int (*)(Arguments...)>(symbol(name))(arguments...);
}

template <typename... Arguments>
void call(const char* name, Arguments... arguments) {
  const int status = status_of(name, arguments...);
  if (status != 0) {
    throw std::runtime_error(std::string(name) + " failed with " + std::to_string(status));
  }
}

}  // namespace emulated
