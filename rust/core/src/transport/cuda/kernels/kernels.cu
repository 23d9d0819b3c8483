// The entry points of one element type's module, which is UNISONO_DTYPE: a number of types.rs.
//
// Common to all: the grid has one dimension (two for `unisono_copy`) and any size, a block has one
// and at most 256 threads. There is no shared memory. Counts are elements; addresses are multiples
// of the element's size (of a part's size for complex numbers). A result may be at the very place
// of a contribution, but not overlap one otherwise.
//
// A good launch has blocks of 256 threads and a thread for every 16 bytes of the result, up to as
// many blocks as the device holds at a time (cuOccupancyMaxActiveBlocksPerMultiprocessor times its
// multiprocessors); what is left the threads stride over. It is fast where the result and all
// contributions begin at a multiple of 16 bytes, or equally far after one.
//
//   unisono_reduce_OP(void* out, Sources in, unsigned sources, unsigned long long count,
//                     unsigned divisor, const unsigned* dead, const unsigned long long* bases,
//                     unsigned long long copies)
//     out[i] = finish(in.at[0][i] OP in.at[1][i] OP …), in this order, for 1 to 64 sources. Where
//     `bases` is not null the addresses in `in` are counted from those in there, one for each
//     source. The result also takes the place of the sources whose bits in `copies` are set. Small
//     floats are accumulated in float32 and rounded once. `avg` divides by `divisor`, the number of
//     ranks, which is not 0; all others ignore it. That of integers takes a sum that cannot wrap.
//     The operators, as `ReduceOp::check` allows them: sum avg prod min max band bor bxor land lor
//     lxor.
//   unisono_scale(void* out, const void* in, unsigned long long count, double factor)
//     out[i] = in[i] * factor, as `reduce::scale` has it: what a rank puts for premul_sum. Of
//     floats and complex numbers.
//   unisono_copy(Segments segments, unsigned count, const unsigned* dead,
//                unsigned long long poison)
//     Copies `count` runs of bytes, at most 64. A row of the grid (blockIdx.y) does one run, then
//     the one that is as many further as there are rows. Runs may have any addresses, but not
//     overlap. Where a run has a `base`, a word of the device's memory, it is read `from` bytes
//     after the address in there. In the module of uint8 alone.
//   unisono_poison(Segments segments, unsigned count, const unsigned* dead,
//                  unsigned long long poison)
//     Does what `unisono_copy` does where the group has failed, and nothing else; `from` is not
//     looked at. For what the driver has copied. In the module of uint8 alone.
//   unisono_look(const unsigned* dead, unsigned* seen)
//     Makes `seen` 1 where `dead` is not 0. In the module of uint8 alone.
//   unisono_place(Places places, unsigned count, unsigned long long* bases, const unsigned* dead,
//                 unsigned* seen)
//     Does that, too, and makes bases[i] the address that `places` say, for at most 64 of them,
//     each by a thread. Its `words` are three of the host's memory: 0 where it is `window`, else
//     from 1 on which entry of `table` it is counted from; how many times 16 bytes, a signed
//     number; and for which operation. An entry may be 0, and the operation another than
//     `operation`: then it is `window` as well. `seen` also becomes 1 where the lowest bit of a
//     `failed` is set, a word of the host's memory or null: then what that rank has published is no
//     result. In the module of uint8 alone.
//
// `dead` is a word of the host's memory, or a word of the device's that `unisono_look` has brought
// it to, or null. Where it is not 0 the group has failed, and what the contributions lie in may be
// no memory any more: nothing is read, and the result is NaN, or zero for types that have none; of
// a copy, the bytes of `poison` again and again. Each block reads it, and reads of one word of the
// host's memory come one after the other, at about a microsecond each: launches of many blocks
// are to look once, and be given `seen`.
#include "loops.cuh"

#ifdef __CUDACC__
#define UNISONO_KERNEL(NAME, ...) \
  extern "C" __global__ void __launch_bounds__(MOST_THREADS) NAME(__VA_ARGS__)
#else
#define UNISONO_KERNEL(NAME, ...)                                            \
  static void NAME(__VA_ARGS__);                                             \
  static const Entry entry_of_##NAME(Module::name, #NAME, Launcher<NAME>()); \
  static void NAME(__VA_ARGS__)
#endif

// Whatever follows the rule is what it is made of.
#define UNISONO_REDUCE(OPERATOR, RULE, ...)                                          \
  UNISONO_KERNEL(unisono_reduce_##OPERATOR, void* out, Sources in, unsigned sources, \
                 unsigned long long count, [[maybe_unused]] unsigned divisor,        \
                 const unsigned* dead, const unsigned long long* bases,              \
                 unsigned long long copies) {                                        \
    if (is_set(dead)) return poison<Element>(out, count);                            \
    reduce<RULE>(out, Several{in, sources, bases, copies}, count, ##__VA_ARGS__);    \
  }

#define UNISONO_JOIN_(LEFT, RIGHT) LEFT##RIGHT
#define UNISONO_JOIN(LEFT, RIGHT) UNISONO_JOIN_(LEFT, RIGHT)
// The processor has all modules in one program.
#define UNISONO_MODULE UNISONO_JOIN(module_, UNISONO_DTYPE)

namespace unisono {
namespace UNISONO_MODULE {

using Module = Numbered<UNISONO_DTYPE>;
using Element = Module::Type;

#if UNISONO_DTYPE == 15  // bool

using All = Logical<And, Element>;
using Any = Logical<Or, Element>;
using Odd = Logical<Xor, Element>;
UNISONO_REDUCE(sum, Any)
UNISONO_REDUCE(prod, All)
UNISONO_REDUCE(min, All)
UNISONO_REDUCE(max, Any)
UNISONO_REDUCE(band, All)
UNISONO_REDUCE(bor, Any)
UNISONO_REDUCE(bxor, Odd)
UNISONO_REDUCE(land, All)
UNISONO_REDUCE(lor, Any)
UNISONO_REDUCE(lxor, Odd)

#else

using Summed = Arithmetic<Sum, Element>;
using Multiplied = Arithmetic<Prod, Element>;
UNISONO_REDUCE(sum, Summed)
UNISONO_REDUCE(prod, Multiplied)

#if UNISONO_DTYPE < 15  // neither bool nor complex

using Least = Arithmetic<Min, Element>;
using Most = Arithmetic<Max, Element>;
using All = Logical<And, Element>;
using Any = Logical<Or, Element>;
using Odd = Logical<Xor, Element>;
UNISONO_REDUCE(min, Least)
UNISONO_REDUCE(max, Most)
UNISONO_REDUCE(land, All)
UNISONO_REDUCE(lor, Any)
UNISONO_REDUCE(lxor, Odd)

#if UNISONO_DTYPE > 6  // an integer

using EveryBit = Bitwise<And, Element>;
using AnyBit = Bitwise<Or, Element>;
using OddBits = Bitwise<Xor, Element>;
UNISONO_REDUCE(band, EveryBit)
UNISONO_REDUCE(bor, AnyBit)
UNISONO_REDUCE(bxor, OddBits)
UNISONO_REDUCE(avg, WholeAverage<Element>, divisor)

#endif
#endif
#endif

#if UNISONO_DTYPE <= 6 || UNISONO_DTYPE > 15  // a float or complex

UNISONO_REDUCE(avg, Average<Element>, divisor)

UNISONO_KERNEL(unisono_scale, void* out, const void* in, unsigned long long count, double factor) {
  reduce<Scale<Element>>(out, One{in}, count, factor);
}

#endif

#if UNISONO_DTYPE == 11  // uint8

UNISONO_KERNEL(unisono_copy, Segments segments, unsigned count, const unsigned* dead,
               unsigned long long poison) {
  if (is_set(dead)) return repeat_all(segments, count, poison);
  for (unsigned row = blockIdx.y; row < count; row += gridDim.y) {
    const Segment& segment = segments.at[row];
    copy(static_cast<char*>(segment.to), based(segment.from, segment.base), segment.bytes);
  }
}

UNISONO_KERNEL(unisono_poison, Segments segments, unsigned count, const unsigned* dead,
               unsigned long long poison) {
  if (is_set(dead)) repeat_all(segments, count, poison);
}

UNISONO_KERNEL(unisono_look, const unsigned* dead, unsigned* seen) {
  if (is_set(dead)) store(seen, 1u);
}

UNISONO_KERNEL(unisono_place, Places places, unsigned count, unsigned long long* bases,
               const unsigned* dead, unsigned* seen) {
  if (is_set(dead) && thread() == 0) store(seen, 1u);
  for (u64 i = thread(); i < count; i += threads()) {
    const Place& place = places.at[i];
    if (place.failed != nullptr && (load_anew(place.failed) & 1) != 0) store(seen, 1u);
    const u32 entry = place.words == nullptr ? 0 : load_anew(place.words);
    u64 at = place.window;
    if (entry != 0 && entry <= MOST_ENTRIES && load_anew(place.words + 2) == place.operation) {
      const u64 begin = load_anew(place.table + (entry - 1));
      if (begin != 0) at = begin + u64(i64(i32(load_anew(place.words + 1)))) * 16;
    }
    store(bases + i, at);
  }
}

#endif

}  // namespace UNISONO_MODULE
}  // namespace unisono

#undef UNISONO_MODULE
#undef UNISONO_JOIN
#undef UNISONO_JOIN_
#undef UNISONO_REDUCE
#undef UNISONO_KERNEL
