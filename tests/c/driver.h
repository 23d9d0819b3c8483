/*
 * The CUDA driver for C tests, without its headers: whatever libcuda.so.1 the loader finds, which
 * is the emulated one, or a real one. Memory, streams, and a gate that a stream does not get past.
 */
#ifndef DRIVER_H
#define DRIVER_H

#include <dlfcn.h>
#include <unistd.h>

#include "check.h"

typedef unsigned long long device_address;

static void* driver_library;

static inline void* driver_function(const char* name) {
  void* function = dlsym(driver_library, name);
  if (!function) FAIL("the CUDA driver has no %s", name);
  return function;
}

/* Calls a function of the driver, whose parameters have these types. */
#define DRIVER(name, parameters, ...)                       \
  do {                                                      \
    int(*function_) parameters;                             \
    *(void**)&function_ = driver_function(name);            \
    const int code_ = function_(__VA_ARGS__);               \
    if (code_ != 0) FAIL("%s: CUDA error %d", name, code_); \
  } while (0)

/* Makes the primary context of a device this thread's. */
static inline void use_device(int device) {
  void* context = NULL;
  DRIVER("cuDevicePrimaryCtxRetain", (void**, int), &context, device);
  DRIVER("cuCtxSetCurrent", (void*), context);
}

static inline void open_driver(void) {
  driver_library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!driver_library) FAIL("%s", dlerror());
  DRIVER("cuInit", (unsigned), 0);
}

static inline void* device_memory(size_t bytes) {
  device_address address = 0;
  DRIVER("cuMemAlloc_v2", (device_address*, size_t), &address, bytes);
  return (void*)(size_t)address;
}

/* Memory of the host that streams copy from and to without the host's waiting. */
static inline void* pinned_memory(size_t bytes) {
  void* memory = NULL;
  DRIVER("cuMemAllocHost_v2", (void**, size_t), &memory, bytes);
  return memory;
}

/* A stream that does not wait for the legacy default stream, nor that for it. */
static inline void* new_stream(void) {
  void* stream = NULL;
  DRIVER("cuStreamCreate", (void**, unsigned), &stream, 1);
  return stream;
}

static inline void to_device(void* to, const void* from, size_t bytes, void* stream) {
  DRIVER("cuMemcpyHtoDAsync_v2", (device_address, const void*, size_t, void*), (size_t)to, from,
         bytes, stream);
}

static inline void to_host(void* to, const void* from, size_t bytes, void* stream) {
  DRIVER("cuMemcpyDtoHAsync_v2", (void*, device_address, size_t, void*), to, (size_t)from, bytes,
         stream);
}

static inline void synchronize(void* stream) {
  DRIVER("cuStreamSynchronize", (void*), stream);
}

/* From here on nothing happens in the stream until the word, pinned, is 1. */
static inline volatile uint32_t* gate(void* stream) {
  volatile uint32_t* word = pinned_memory(sizeof *word);
  *word = 0;
  DRIVER("cuStreamWaitValue32_v2", (void*, device_address, uint32_t, unsigned), stream,
         (size_t)word, 1, 0);
  return word;
}

/* Waits until the library has given back to an emulated driver what it had mapped and registered,
 * which threads of its own do after the last communicator has gone; not for long, since what is
 * left is in the driver's report. A driver that was loaded later than the library ends before it.
 */
static inline void wait_for_the_last(void) {
  size_t (*report)(char*, size_t) = NULL;
  *(void**)&report = dlsym(driver_library, "cuEmulatorStatistics");
  static char text[1 << 16];
  for (int looks = 0; report && looks < 5000; ++looks) {
    report(text, sizeof text);
    if (strstr(text, "\"registrations\": 0,") && strstr(text, "\"imports\": 0,")) return;
    usleep(1000);
  }
}

#endif
