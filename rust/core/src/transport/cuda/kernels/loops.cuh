// How a kernel's threads share the elements.
//
// Elements are worked on as vectors of 16 bytes where every address is a multiple of 16 after the
// same number of elements (as they are when the buffers come from an allocator and are
// cut at even places), and one by one elsewhere: those before the first and after the last vector,
// or all. Any grid of one dimension will do: the threads stride over the units until all are done.
//
// A thread takes two units at a time where it can hold their numbers, and contributions two by two:
// it asks for all units of both before it combines the first, so that four loads are under way.
//
// Each unit is read and then written by one thread alone: this is why the result may take the place
// of a contribution.
#pragma once

#include "memory.cuh"
#include "operators.cuh"

namespace unisono {

constexpr unsigned MOST_SOURCES = 64;
// The most threads of a block.
constexpr unsigned MOST_THREADS = 256;

// The addresses of the contributions, in rank order.
struct Sources {
  const void* at[MOST_SOURCES];
};

// A run of bytes to copy, and all runs of a launch.
struct Segment {
  const void* from;
  void* to;
  unsigned long long bytes;
  const unsigned long long* base;
};
struct Segments {
  Segment at[MOST_SOURCES];
};

// The most entries of a table of places.
constexpr unsigned MOST_ENTRIES = 256;

// Where a contribution lies: as `words` say, or at `window`.
struct Place {
  const u32* words;
  const unsigned long long* table;
  unsigned long long window;
  unsigned long long operation;
  const u32* failed;
};
struct Places {
  Place at[MOST_SOURCES];
};

// `at`, or the address that is `at` bytes after the one in `base`.
UNISONO_DEVICE char* based(const void* at, const unsigned long long* base) {
  const u64 before = base == nullptr ? 0 : load(base);
  return reinterpret_cast<char*>(before + reinterpret_cast<u64>(at));
}

// The contributions of a reduction. The result takes the place of some of them, too (`copies`).
struct Several {
  const Sources& sources;
  u32 count;
  const unsigned long long* bases;
  u64 copies;
  UNISONO_DEVICE char* at(u32 source) const {
    return based(sources.at[source], bases == nullptr ? nullptr : bases + source);
  }
};

// One alone.
struct One {
  const void* source;
  static constexpr u32 count = 1;
  static constexpr u64 copies = 0;
  UNISONO_DEVICE char* at(u32) const { return static_cast<char*>(const_cast<void*>(source)); }
};

UNISONO_DEVICE u64 address(const void* at) {
  return reinterpret_cast<u64>(at);
}

UNISONO_DEVICE u64 threads() {
  return u64(gridDim.x) * blockDim.x;
}
UNISONO_DEVICE u64 thread() {
  return u64(blockIdx.x) * blockDim.x + threadIdx.x;
}

// Where the elements are that vectors do not reach: `head` before the first vector, and all from
// `tail` on.
struct Split {
  u64 head, vectors, tail, elements;

  // How `count` elements of `size` bytes at `first` divide into vectors, if all other addresses
  // differ from `first` by multiples of 16 (their difference's bits are in `misfit`).
  UNISONO_DEVICE Split(const void* first, u64 misfit, u64 count, u32 size) {
    u32 gap = u32(0 - address(first)) % sizeof(Vector);
    bool fits = misfit % sizeof(Vector) == 0 && gap % size == 0 && gap / size <= count;
    head = fits ? gap / size : count;
    vectors = (count - head) / (sizeof(Vector) / size);
    tail = head + vectors * (sizeof(Vector) / size);
    elements = head + (count - tail);
  }
  // The place of the n-th element outside the vectors.
  UNISONO_DEVICE u64 element(u64 n) const { return n < head ? n : n - head + tail; }
};

// The units of a result that one thread makes together: up to `UNITS` of them.
template <class Rule, class Unit, int UNITS, class Inputs>
struct Batch {
  using Pack = Numbers<typename Rule::Element, Unit>;
  using Number = typename Rule::Number;
  static constexpr int LANES = sizeof(Unit) / sizeof(typename Rule::Element);

  // Bytes from the beginning of each buffer, and whether the unit is one that is to be made.
  u64 offsets[UNITS];
  bool wanted[UNITS];

  // One contribution's part of the units.
  struct Loaded {
    Unit units[UNITS];
  };

  UNISONO_DEVICE Loaded load_from(const char* source) const {
    Loaded loaded = {};
    UNISONO_UNROLL
    for (int i = 0; i < UNITS; ++i) {
      if (wanted[i]) loaded.units[i] = load(reinterpret_cast<const Unit*>(source + offsets[i]));
    }
    return loaded;
  }

  UNISONO_DEVICE void store_to(char* to, const Loaded& made) const {
    UNISONO_UNROLL
    for (int i = 0; i < UNITS; ++i) {
      if (wanted[i]) store(reinterpret_cast<Unit*>(to + offsets[i]), made.units[i]);
    }
  }

  UNISONO_DEVICE void make(const Rule& rule, char* out, const Inputs& in) const {
    Number results[UNITS][LANES] = {};
    u32 source = 0;
    UNISONO_ROLLED
    while (source < in.count) {
      const u32 end = source + 1 < in.count ? source + 2 : source + 1;
      Loaded next = {};
      Loaded loaded = load_from(in.at(source));
      if (source + 1 < end) next = load_from(in.at(source + 1));
      UNISONO_ROLLED
      for (; source < end; ++source) {
        UNISONO_UNROLL
        for (int i = 0; i < UNITS; ++i) {
          Pack pack = bits<Pack>(loaded.units[i]);
          UNISONO_UNROLL
          for (int j = 0; j < LANES; ++j) {
            Number number = rule.take(pack.at[j]);
            results[i][j] = source == 0 ? number : rule.fold(results[i][j], number);
          }
        }
        loaded = next;
      }
    }
    Loaded made;
    UNISONO_UNROLL
    for (int i = 0; i < UNITS; ++i) {
      Pack pack;
      UNISONO_UNROLL
      for (int j = 0; j < LANES; ++j) pack.at[j] = rule.finish(results[i][j]);
      made.units[i] = bits<Unit>(pack);
    }
    store_to(out, made);
    if (in.copies == 0) return;
    UNISONO_ROLLED
    for (u32 to = 0; to < in.count; ++to) {
      if (in.copies >> to & 1) store_to(in.at(to), made);
    }
  }
};

// Makes `count` units. The n-th lies `offset(n)` bytes from the beginning.
template <class Unit, int UNITS, class Rule, class Inputs, class Offset>
UNISONO_DEVICE void make_all(const Rule& rule, void* out, const Inputs& in, u64 count,
                             Offset offset) {
  const u64 step = threads();
  UNISONO_ROLLED
  for (u64 first = thread(); first < count; first += UNITS * step) {
    Batch<Rule, Unit, UNITS, Inputs> batch;
    UNISONO_UNROLL
    for (int i = 0; i < UNITS; ++i) {
      batch.wanted[i] = first + i * step < count;
      batch.offsets[i] = offset(first + i * step);
    }
    batch.make(rule, static_cast<char*>(out), in);
  }
}

// out[i] = the result of all contributions' i-th element, for `count` elements.
template <class Rule, class Inputs, class... Value>
UNISONO_DEVICE void reduce(void* out, const Inputs& in, u64 count, Value... value) {
  using Element = typename Rule::Element;
  constexpr u32 size = sizeof(Element);
  u64 misfit = 0;
  UNISONO_ROLLED
  for (u32 source = 0; source < in.count; ++source) misfit |= address(in.at(source)) ^ address(out);
  const Split split(out, misfit, count, size);

  // So that a thread holds about as many numbers, whatever their size, and room for a long
  // division.
  constexpr int units = size == 1 || (size == 8 && sizeof(typename Rule::Number) > 8) ? 1 : 2;
  const typename Lanes<Rule>::Type lanes{value...};
  make_all<Vector, units>(lanes, out, in, split.vectors,
                          [=](u64 n) { return split.head * size + n * sizeof(Vector); });
  const Rule rule{value...};
  make_all<Element, 2>(rule, out, in, split.elements,
                       [=](u64 n) { return split.element(n) * size; });
}

// out[i] = the value of a result that could not be made, for `count` elements.
template <class Element>
UNISONO_DEVICE void poison(void* out, u64 count) {
  UNISONO_ROLLED
  for (u64 i = thread(); i < count; i += threads()) {
    store(static_cast<Element*>(out) + i, Poison<Element>::value());
  }
}

// The bytes of `pattern`, the lowest first, again and again, for `bytes` bytes.
UNISONO_DEVICE void repeat(char* to, u64 pattern, u64 bytes) {
  UNISONO_ROLLED
  for (u64 i = thread(); i < bytes; i += threads()) store(to + i, char(pattern >> (i % 8 * 8)));
}

// The same for `count` runs, each by a row of the grid.
UNISONO_DEVICE void repeat_all(const Segments& segments, u32 count, u64 pattern) {
  UNISONO_ROLLED
  for (u32 row = blockIdx.y; row < count; row += gridDim.y) {
    repeat(static_cast<char*>(segments.at[row].to), pattern, segments.at[row].bytes);
  }
}

// `count` units, several under way at a time.
template <class Unit>
UNISONO_DEVICE void copy_units(char* to, const char* from, u64 count) {
  constexpr int units = sizeof(Unit) == sizeof(Vector) ? 4 : 2;
  const u64 step = threads();
  const Unit* source = reinterpret_cast<const Unit*>(from);
  Unit* target = reinterpret_cast<Unit*>(to);
  u64 i = thread();
  UNISONO_ROLLED
  for (; i + (units - 1) * step < count; i += units * step) {
    Unit under_way[units];
    UNISONO_UNROLL
    for (int u = 0; u < units; ++u) under_way[u] = load(source + i + u * step);
    UNISONO_UNROLL
    for (int u = 0; u < units; ++u) store(target + i + u * step, under_way[u]);
  }
  UNISONO_ROLLED
  for (; i < count; i += step) store(target + i, load(source + i));
}

// `bytes` bytes by units, and byte by byte where no unit begins or ends.
template <class Unit>
UNISONO_DEVICE void copy_as(char* to, const char* from, u64 bytes) {
  const u64 gap = (0 - address(to)) % sizeof(Unit);
  const u64 head = gap < bytes ? gap : bytes;
  const u64 units = (bytes - head) / sizeof(Unit);
  const u64 tail = head + units * sizeof(Unit);
  copy_units<Unit>(to + head, from + head, units);
  UNISONO_ROLLED
  for (u64 i = thread(); i < head + (bytes - tail); i += threads()) {
    const u64 at = i < head ? i : i - head + tail;
    store(to + at, load(from + at));
  }
}

// By the widest unit that both addresses allow.
UNISONO_DEVICE void copy(char* to, const char* from, u64 bytes) {
  const u64 misfit = address(to) ^ address(from);
  if (misfit % 16 == 0) return copy_as<Vector>(to, from, bytes);
  if (misfit % 8 == 0) return copy_as<u64>(to, from, bytes);
  if (misfit % 4 == 0) return copy_as<u32>(to, from, bytes);
  if (misfit % 2 == 0) return copy_as<u16>(to, from, bytes);
  return copy_as<u8>(to, from, bytes);
}

}  // namespace unisono
