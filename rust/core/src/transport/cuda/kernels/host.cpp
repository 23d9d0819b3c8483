// All modules for the processor; see host.hpp.
#include "host.hpp"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <tuple>
#include <utility>
#include <vector>

namespace unisono {
namespace {

struct Index {
  unsigned x, y, z;
};

// CUDA's own names, for the simulated thread.
thread_local Index gridDim, blockDim, blockIdx, threadIdx;

std::atomic<UnisonoTranslate> translate;

void* translated(const void* address, size_t bytes, bool writes) {
  if (UnisonoTranslate translate_now = translate.load(std::memory_order_relaxed)) {
    return translate_now(address, bytes, writes);
  }
  if (reinterpret_cast<size_t>(address) % bytes != 0) {
    fprintf(stderr, "a kernel accesses %zu bytes at %p, which is not aligned\n", bytes, address);
    abort();
  }
  return const_cast<void*>(address);
}

std::vector<UnisonoKernel>& table() {
  static std::vector<UnisonoKernel> kernels;
  return kernels;
}

// Calls `body` as every thread of the grid.
template <class Body>
void for_each_thread(const unsigned grid[3], const unsigned block[3], Body body) {
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  for (unsigned row = 0; row < grid[1] * grid[2]; ++row) {
    for (unsigned column = 0; column < grid[0]; ++column) {
      blockIdx = {column, row % grid[1], row / grid[1]};
      for (unsigned thread = 0; thread < block[0] * block[1] * block[2]; ++thread) {
        threadIdx = {thread % block[0], thread / block[0] % block[1], thread / block[0] / block[1]};
        body();
      }
    }
  }
}

template <class Parameter>
Parameter copied(const void* value) {
  Parameter parameter;
  memcpy(&parameter, value, sizeof parameter);
  return parameter;
}

// How a kernel is launched, from its signature.
template <auto* KERNEL>
struct Launcher;
template <class... Parameters, void (*KERNEL)(Parameters...)>
struct Launcher<KERNEL> {
  static constexpr size_t sizes[] = {sizeof(Parameters)...};

  template <size_t... I>
  static void launch_with(void** values, const unsigned grid[3], const unsigned block[3],
                          std::index_sequence<I...>) {
    const std::tuple<Parameters...> parameters{copied<Parameters>(values[I])...};
    for_each_thread(grid, block, [&] { std::apply(KERNEL, parameters); });
  }
  static void launch(void** values, const unsigned grid[3], const unsigned block[3]) {
    launch_with(values, grid, block, std::index_sequence_for<Parameters...>());
  }
};

// Puts an entry point into the table.
struct Entry {
  template <class Launcher>
  Entry(const char* dtype, const char* name, Launcher) {
    table().push_back({dtype, name, sizeof Launcher::sizes / sizeof *Launcher::sizes,
                       Launcher::sizes, Launcher::launch});
  }
};

}  // namespace
}  // namespace unisono

#include "loops.cuh"

#define UNISONO_DTYPE 1
#include "kernels.cu"
#undef UNISONO_DTYPE
#define UNISONO_DTYPE 2
#include "kernels.cu"
#undef UNISONO_DTYPE
#define UNISONO_DTYPE 3
#include "kernels.cu"
#undef UNISONO_DTYPE
#define UNISONO_DTYPE 4
#include "kernels.cu"
#undef UNISONO_DTYPE
#define UNISONO_DTYPE 5
#include "kernels.cu"
#undef UNISONO_DTYPE
#define UNISONO_DTYPE 6
#include "kernels.cu"
#undef UNISONO_DTYPE
#define UNISONO_DTYPE 7
#include "kernels.cu"
#undef UNISONO_DTYPE
#define UNISONO_DTYPE 8
#include "kernels.cu"
#undef UNISONO_DTYPE
#define UNISONO_DTYPE 9
#include "kernels.cu"
#undef UNISONO_DTYPE
#define UNISONO_DTYPE 10
#include "kernels.cu"
#undef UNISONO_DTYPE
#define UNISONO_DTYPE 11
#include "kernels.cu"
#undef UNISONO_DTYPE
#define UNISONO_DTYPE 12
#include "kernels.cu"
#undef UNISONO_DTYPE
#define UNISONO_DTYPE 13
#include "kernels.cu"
#undef UNISONO_DTYPE
#define UNISONO_DTYPE 14
#include "kernels.cu"
#undef UNISONO_DTYPE
#define UNISONO_DTYPE 15
#include "kernels.cu"
#undef UNISONO_DTYPE
#define UNISONO_DTYPE 16
#include "kernels.cu"
#undef UNISONO_DTYPE
#define UNISONO_DTYPE 17
#include "kernels.cu"
#undef UNISONO_DTYPE

extern "C" const UnisonoKernel* unisono_kernels(size_t* count) {
  *count = unisono::table().size();
  return unisono::table().data();
}

extern "C" void unisono_kernels_translate(UnisonoTranslate translate) {
  unisono::translate.store(translate, std::memory_order_relaxed);
}
