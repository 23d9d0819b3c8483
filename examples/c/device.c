/*
 * Numbers in the memory of a GPU: the sum happens in the order of a stream, between what is put
 * there before and after it, and nothing waits on the host until the end.
 *
 *   unisono launch -n 4 ./device
 *
 * It needs CUDA's driver but no toolkit: the handful of functions it calls are looked up in the
 * driver's library, which comes with the GPU. A program that is compiled with CUDA calls
 * cudaMallocAsync, its kernels and so on in their place, and gives its cudaStream_t as it is.
 */
#include <dlfcn.h>
#include <string.h>

#include "example.h"

#define COUNT ((size_t)1000000)

/* A driver's function returns 0 for success. CUdeviceptr is a number. */
typedef unsigned long long device_address;

static struct {
  int (*init)(unsigned flags);
  int (*device_count)(int* count);
  int (*primary_context)(void** context, int device);
  int (*set_context)(void* context);
  int (*allocate)(device_address* address, size_t bytes);
  int (*free)(device_address address);
  int (*create_stream)(void** stream, unsigned flags);
  int (*synchronize)(void* stream);
  int (*fill)(device_address address, unsigned value, size_t count, void* stream);
  int (*to_host)(void* to, device_address from, size_t bytes, void* stream);
} cuda;

static void cuda_check(int code, const char* call) {
  if (code == 0) return;
  fprintf(stderr, "%s: CUDA error %d\n", call, code);
  exit(1);
}

#define CUDA_CHECK(call) cuda_check((call), #call)

/* Looks up one function of the driver; its address is put where a pointer to it is kept. */
static void look_up(void* library, const char* name, void* place) {
  void* function = dlsym(library, name);
  if (function == NULL) {
    fprintf(stderr, "the CUDA driver has no %s\n", name);
    exit(1);
  }
  memcpy(place, &function, sizeof function);
}

/* Whether there is a driver. */
static int find_cuda(void) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == NULL) return 0;
  look_up(library, "cuInit", &cuda.init);
  look_up(library, "cuDeviceGetCount", &cuda.device_count);
  look_up(library, "cuDevicePrimaryCtxRetain", &cuda.primary_context);
  look_up(library, "cuCtxSetCurrent", &cuda.set_context);
  look_up(library, "cuMemAlloc_v2", &cuda.allocate);
  look_up(library, "cuMemFree_v2", &cuda.free);
  look_up(library, "cuStreamCreate", &cuda.create_stream);
  look_up(library, "cuStreamSynchronize", &cuda.synchronize);
  look_up(library, "cuMemsetD32Async", &cuda.fill);
  look_up(library, "cuMemcpyDtoHAsync_v2", &cuda.to_host);
  return cuda.init(0) == 0;
}

int main(void) {
  int32_t rank, size;
  unisono_communicator* comm = join(&rank, &size);
  if (!find_cuda()) {
    if (rank == 0) printf("rank 0: there is no CUDA driver here\n");
    CHECK(unisono_communicator_destroy(comm));
    return 0;
  }

  /* A device for each rank, or several ranks on one. */
  int devices = 0;
  void *context = NULL, *stream = NULL;
  device_address numbers = 0;
  CUDA_CHECK(cuda.device_count(&devices));
  CUDA_CHECK(cuda.primary_context(&context, rank % devices));
  CUDA_CHECK(cuda.set_context(context));
  CUDA_CHECK(cuda.create_stream(&stream, 0));
  CUDA_CHECK(cuda.allocate(&numbers, COUNT * sizeof(int32_t)));
  int32_t* result = allocate(COUNT, sizeof(int32_t));

  /* Each of these only puts work into the stream. */
  unisono_options on_stream = UNISONO_OPTIONS_INIT;
  on_stream.stream = stream;
  void* buffer = (void*)(size_t)numbers;
  CUDA_CHECK(cuda.fill(numbers, (unsigned)rank + 1, COUNT, stream));
  CHECK(unisono_all_reduce(comm, buffer, buffer, COUNT, UNISONO_INT32, UNISONO_SUM, &on_stream,
                           NULL));
  CUDA_CHECK(cuda.to_host(result, numbers, COUNT * sizeof(int32_t), stream));
  CUDA_CHECK(cuda.synchronize(stream));
  /* The failure of an operation after its call had returned, if there was one. */
  CHECK(unisono_communicator_status(comm));

  size_t wrong = 0;
  for (size_t i = 0; i < COUNT; i++) wrong += result[i] != size * (size + 1) / 2;
  if (rank == 0 || wrong) {
    printf("rank %d: %d ranks added %d numbers on %d device%s%s\n", (int)rank, (int)size,
           (int)COUNT, devices, devices == 1 ? "" : "s", wrong ? ", wrongly" : "");
  }

  CUDA_CHECK(cuda.free(numbers));
  free(result);
  CHECK(unisono_communicator_destroy(comm));
  return wrong ? 1 : 0;
}
