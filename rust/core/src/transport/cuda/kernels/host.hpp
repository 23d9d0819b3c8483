// The kernels as plain C++17, for a machine without a GPU: the emulated driver and the tests of the
// kernels run them through this. It is no part of the library.
//
// How it is compiled. `host.cpp`, in this folder, is the one file to compile; it includes
// everything else, once per element type. With the cc crate:
//
//     cc::Build::new().cpp(true).std("c++17").opt_level(1).flag("-ffp-contract=off").file("…/host.cpp")
//
// `-ffp-contract=off` is not optional: a product and a sum must be rounded apart, as on the device.
// The crate `unisono-cuda-kernels` (tests/cuda/kernels) does just this and puts the table below
// into Rust; who writes Rust depends on that crate and needs nothing from here.
//
// How a kernel is found. `unisono_kernels(&count)` is the table of all entry points of all modules.
// A module is known by its element type's name, which is the second word of the first line of its
// PTX (`// float32 …`), an entry point by its name (`unisono_reduce_sum`).
//
// How it is launched. `launch(parameters, grid, block)` takes parameters as cuLaunchKernel does:
// one pointer per parameter to its value. cuLaunchKernel copies the values before it returns, so an
// emulation that launches later has to, too: `sizes` are their bytes. The simulated threads
// run one after the other in the calling thread, in no order worth relying on. Launches in several
// threads at once are fine.
//
// How memory is reached. Addresses are the device's. For every access the kernels call the function
// set by `unisono_kernels_translate` with the address, the bytes of the access (1, 2, 4, 8 or 16)
// and whether it writes; it returns where those bytes are in this process. A real device faults
// where the address is not mapped, not inside one allocation or not a multiple of `bytes`: then the
// function returns NULL and remembers the fault, a read gives zeros, a write is lost, and the
// kernel goes on. Until a function is set addresses are taken as they are, and a misaligned one
// aborts.
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct UnisonoKernel {
  const char* dtype;    // the module: "float32", as types.rs names it
  const char* name;     // the entry point: "unisono_reduce_sum"
  unsigned parameters;  // how many it takes
  const size_t* sizes;  // bytes of each
  void (*launch)(void** parameters, const unsigned grid[3], const unsigned block[3]);
};

const struct UnisonoKernel* unisono_kernels(size_t* count);

typedef void* (*UnisonoTranslate)(const void* address, size_t bytes, int writes);

void unisono_kernels_translate(UnisonoTranslate translate);

#ifdef __cplusplus
}
#endif
