// The element types: their bits, and the type in which they are calculated with.
//
// The code here and in operators.cuh does the same as `rust/reduce`, to the bit: a result may not
// depend on whether it was made on the device or on the processor. The one exception is the
// hardware's: which NaN a sum or a product gives.
#pragma once

#ifdef __CUDACC__
#define UNISONO_DEVICE __device__ __forceinline__
#define UNISONO_UNROLL _Pragma("unroll")
#define UNISONO_ROLLED _Pragma("unroll 1")
#else
#define UNISONO_DEVICE inline
#define UNISONO_UNROLL
#define UNISONO_ROLLED
#endif

namespace unisono {

using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;

// The same bits as another type.
template <class To, class From>
UNISONO_DEVICE To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

struct Float16 {
  u16 bits;
};
struct BFloat16 {
  u16 bits;
};
struct Float8E4M3 {
  u8 bits;
};
struct Float8E5M2 {
  u8 bits;
};
// True when it is not 0.
struct Bool {
  u8 byte;
};
template <class Part>
struct Complex {
  Part real, imaginary;
};

// The element type with this number in types.rs.
template <int NUMBER>
struct Numbered;

#ifdef __CUDACC__
#define UNISONO_NUMBERED(NUMBER, NAME, TYPE) \
  template <>                                \
  struct Numbered<NUMBER> {                  \
    using Type = TYPE;                       \
  };
#else
#define UNISONO_NUMBERED(NUMBER, NAME, TYPE)  \
  template <>                                 \
  struct Numbered<NUMBER> {                   \
    using Type = TYPE;                        \
    static constexpr const char* name = NAME; \
  };
#endif

UNISONO_NUMBERED(1, "float16", Float16)
UNISONO_NUMBERED(2, "bfloat16", BFloat16)
UNISONO_NUMBERED(3, "float32", float)
UNISONO_NUMBERED(4, "float64", double)
UNISONO_NUMBERED(5, "float8_e4m3fn", Float8E4M3)
UNISONO_NUMBERED(6, "float8_e5m2", Float8E5M2)
UNISONO_NUMBERED(7, "int8", i8)
UNISONO_NUMBERED(8, "int16", i16)
UNISONO_NUMBERED(9, "int32", i32)
UNISONO_NUMBERED(10, "int64", i64)
UNISONO_NUMBERED(11, "uint8", u8)
UNISONO_NUMBERED(12, "uint16", u16)
UNISONO_NUMBERED(13, "uint32", u32)
UNISONO_NUMBERED(14, "uint64", u64)
UNISONO_NUMBERED(15, "bool", Bool)
UNISONO_NUMBERED(16, "complex64", Complex<float>)
UNISONO_NUMBERED(17, "complex128", Complex<double>)

// The type that contributions are accumulated in: float for the small floats, else the element
// type.
template <class Element>
struct Accumulated {
  using Type = Element;
};
template <>
struct Accumulated<Float16> {
  using Type = float;
};
template <>
struct Accumulated<BFloat16> {
  using Type = float;
};
template <>
struct Accumulated<Float8E4M3> {
  using Type = float;
};
template <>
struct Accumulated<Float8E5M2> {
  using Type = float;
};
template <class Element>
using Accumulator = typename Accumulated<Element>::Type;

// The bits of float's infinity; everything above, the sign aside, is NaN.
constexpr u32 INFINITE = 0x7f800000;

// The bits of a float16 as a float.
UNISONO_DEVICE float widen_half(u16 half) {
#ifdef __CUDACC__
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half));
  return wide;
#else
  u32 sign = u32(half & 0x8000) << 16;
  u32 magnitude = half & 0x7fff;
  u32 normal = (magnitude << 13) + ((127 - 15) << 23);
  u32 subnormal = bits<u32>(float(magnitude) * bits<float>(u32(127 - 15 - 9) << 23));
  u32 finite = magnitude < 0x400 ? subnormal : normal;
  u32 quiet = magnitude > 0x7c00 ? 0x00400000 : 0;
  u32 special = (magnitude << 13) | INFINITE | quiet;
  return bits<float>(sign | (magnitude >= 0x7c00 ? special : finite));
#endif
}

// The magnitude of a float, rounded to nearest, ties to even, to a type with MANTISSA bits after
// the point and this bias, in that type's bits. A value that exceeds the type comes out as a number
// beyond its largest.
template <u32 MANTISSA, u32 BIAS>
UNISONO_DEVICE u32 round(u32 magnitude) {
  constexpr u32 shift = 23 - MANTISSA;
  constexpr u32 half_less_one = (1u << (shift - 1)) - 1;
  u32 even = (magnitude >> shift) & 1;
  u32 normal = ((magnitude + half_less_one + even) >> shift) - ((127 - BIAS) << MANTISSA);
  // The smallest step is 2^(1 - BIAS - MANTISSA); a float of 2^23 times that counts in such steps.
  constexpr u32 counter = (127 + 23 + 1 - BIAS - MANTISSA) << 23;
  u32 subnormal = bits<u32>(bits<float>(magnitude) + bits<float>(counter)) - counter;
  return magnitude < ((127 + 1 - BIAS) << 23) ? subnormal : normal;
}

UNISONO_DEVICE u32 least(u32 a, u32 b) {
  return b < a ? b : a;
}

// From an element to its accumulator.
template <class Element>
UNISONO_DEVICE Element widen(Element element) {
  return element;
}
UNISONO_DEVICE float widen(Float16 element) {
  return widen_half(element.bits);
}
UNISONO_DEVICE float widen(BFloat16 element) {
  return bits<float>(u32(element.bits) << 16);
}
UNISONO_DEVICE float widen(Float8E5M2 element) {
  // It is the upper half of a float16.
  return widen_half(u16(element.bits << 8));
}
UNISONO_DEVICE float widen(Float8E4M3 element) {
  // The same digits are a float16 with an exponent of 4 bits, whose bias is 15 instead of 7. The
  // one NaN has all bits set, and so it has in float.
  u32 digits = u32(element.bits) << 7;
  float value = widen_half(u16((digits & 0x3f80) | ((digits << 1) & 0x8000))) * 256.0f;
  return bits<float>(bits<u32>(value) | ((digits & 0x3f80) == 0x3f80 ? 0x7ff00000 : 0));
}

// From an accumulator to the element, to nearest with ties to even.
template <class Element>
struct Narrow {
  UNISONO_DEVICE static Element from(Element number) { return number; }
};
template <>
struct Narrow<Bool> {
  UNISONO_DEVICE static Bool from(u8 byte) { return Bool{byte}; }
};
template <>
struct Narrow<Float16> {
  UNISONO_DEVICE static Float16 from(float number) {
    u32 sign = (bits<u32>(number) >> 16) & 0x8000;
    u32 magnitude = bits<u32>(number) & 0x7fffffff;
    u32 nan = sign | 0x7e00 | ((magnitude >> 13) & 0x3ff);
#ifdef __CUDACC__
    u16 rounded;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(number));
#else
    u32 rounded = sign | least(round<10, 15>(magnitude), 0x7c00);
#endif
    return Float16{u16(magnitude > INFINITE ? nan : rounded)};
  }
};
template <>
struct Narrow<BFloat16> {
  UNISONO_DEVICE static BFloat16 from(float number) {
    u32 wide = bits<u32>(number);
    u32 nan = (wide >> 16) | 0x40;
    u32 rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    return BFloat16{u16((wide & 0x7fffffff) > INFINITE ? nan : rounded)};
  }
};
template <>
struct Narrow<Float8E4M3> {
  UNISONO_DEVICE static Float8E4M3 from(float number) {
    u32 magnitude = bits<u32>(number) & 0x7fffffff;
    // There is no infinity: 0x7e is 448, the largest value, and 0x7f is NaN.
    u32 rounded = least(round<3, 7>(magnitude), 0x7e);
    u32 sign = (bits<u32>(number) >> 24) & 0x80;
    return Float8E4M3{u8(sign | (magnitude > INFINITE ? 0x7f : rounded))};
  }
};
template <>
struct Narrow<Float8E5M2> {
  UNISONO_DEVICE static Float8E5M2 from(float number) {
    u32 magnitude = bits<u32>(number) & 0x7fffffff;
    u32 rounded = least(round<2, 15>(magnitude), 0x7c);
    u32 sign = (bits<u32>(number) >> 24) & 0x80;
    return Float8E5M2{u8(sign | (magnitude > INFINITE ? 0x7f : rounded))};
  }
};

// The value of a result that could not be made: NaN, or zero where there is none.
template <class Element>
struct Poison {
  UNISONO_DEVICE static Element value() { return Element{}; }
};
#define UNISONO_POISON(TYPE, ...)                              \
  template <>                                                  \
  struct Poison<TYPE> {                                        \
    UNISONO_DEVICE static TYPE value() { return __VA_ARGS__; } \
  };
UNISONO_POISON(Float16, Float16{0x7e00})
UNISONO_POISON(BFloat16, BFloat16{0x7fc0})
UNISONO_POISON(float, bits<float>(0x7fc00000u))
UNISONO_POISON(double, bits<double>(u64(0x7ff8000000000000)))
UNISONO_POISON(Float8E4M3, Float8E4M3{0x7f})
UNISONO_POISON(Float8E5M2, Float8E5M2{0x7f})
#undef UNISONO_POISON
template <class Part>
struct Poison<Complex<Part>> {
  UNISONO_DEVICE static Complex<Part> value() {
    return {Poison<Part>::value(), Poison<Part>::value()};
  }
};

// Whether it is anything but zero; NaN is.
template <class Element>
UNISONO_DEVICE bool truth(Element element) {
  return element != Element(0);
}
UNISONO_DEVICE bool truth(Float16 element) {
  return (element.bits & 0x7fff) != 0;
}
UNISONO_DEVICE bool truth(BFloat16 element) {
  return (element.bits & 0x7fff) != 0;
}
UNISONO_DEVICE bool truth(Float8E4M3 element) {
  return (element.bits & 0x7f) != 0;
}
UNISONO_DEVICE bool truth(Float8E5M2 element) {
  return (element.bits & 0x7f) != 0;
}
UNISONO_DEVICE bool truth(Bool element) {
  return element.byte != 0;
}

}  // namespace unisono
