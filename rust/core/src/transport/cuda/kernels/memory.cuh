// Device memory: single elements, and vectors of 16 bytes.
#pragma once

#include "numbers.cuh"

namespace unisono {

struct alignas(16) Vector {
  u32 words[4];
};

#ifdef __CUDACC__

// Addresses given to a kernel point to global memory; generic accesses are slower.
template <class Number>
UNISONO_DEVICE Number load(const Number* at) {
  __builtin_assume(__isGlobal(at));
  return *at;
}
template <class Number>
UNISONO_DEVICE void store(Number* at, Number number) {
  __builtin_assume(__isGlobal(at));
  *at = number;
}
// Volatile, so that they stay in the order in which they are written below: all loads first.
UNISONO_DEVICE Vector load(const Vector* at) {
  Vector v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
               : "l"(at));
  return v;
}
UNISONO_DEVICE void store(Vector* at, Vector v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.words[0]),
               "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3])
               : "memory");
}

// The present value of memory that the host or another device writes.
UNISONO_DEVICE u32 load_anew(const u32* at) {
  u32 value;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(value) : "l"(at));
  return value;
}
UNISONO_DEVICE u64 load_anew(const u64* at) {
  u64 value;
  asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(value) : "l"(at));
  return value;
}

// Whether a word is set; false where there is none. A block reads it once, for each read of the
// host's memory crosses the bus: its first thread does, and the others learn of it.
UNISONO_DEVICE bool is_set(const u32* word) {
  u32 value = 0;
  if (word != nullptr && threadIdx.x == 0) value = load_anew(word);
  return __syncthreads_or(value != 0) != 0;
}

#else

// As host.hpp says.
template <class Unit>
inline Unit load_unit(const Unit* at) {
  Unit unit{};
  if (const void* here = translated(at, sizeof unit, false)) memcpy(&unit, here, sizeof unit);
  return unit;
}
template <class Unit>
inline void store_unit(Unit* at, Unit unit) {
  if (void* here = translated(at, sizeof unit, true)) memcpy(here, &unit, sizeof unit);
}
template <class Unit>
inline Unit load_anew(const Unit* at) {
  return load_unit(at);
}
inline bool is_set(const u32* word) {
  return word != nullptr && load_unit(word) != 0;
}
template <class Number>
inline Number load(const Number* at) {
  return load_unit(at);
}
template <class Number>
inline void store(Number* at, Number number) {
  store_unit(at, number);
}
// An address of one is a multiple of a part's size, not always of its own: the device takes two.
template <class Part>
inline Complex<Part> load(const Complex<Part>* at) {
  return {load_unit(&at->real), load_unit(&at->imaginary)};
}
template <class Part>
inline void store(Complex<Part>* at, Complex<Part> number) {
  store_unit(&at->real, number.real);
  store_unit(&at->imaginary, number.imaginary);
}

#endif

// The numbers in a unit of memory, which is a vector or an element.
template <class Number, class Unit>
struct Numbers {
  Number at[sizeof(Unit) / sizeof(Number)];
};

}  // namespace unisono
