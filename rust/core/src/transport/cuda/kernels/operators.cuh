// The operators, and for each the rule by which contributions become a result.
//
// A rule knows four things: the type of the numbers it calculates with, how an element becomes one
// (`take`), how two are combined (`fold`), and how the last one becomes the result (`finish`). The
// element is what the rule works on, not always the buffer's: bits are combined in words of 32,
// bools in fours (see `Lanes`).
#pragma once

#include "numbers.cuh"

namespace unisono {

// Unsigned arithmetic of at least 32 bits wraps around; what C++ would promote to int need not.
template <unsigned BYTES>
struct WrappingBytes {
  using Type = u32;
};
template <>
struct WrappingBytes<8> {
  using Type = u64;
};
template <class Integer>
using Wrapping = typename WrappingBytes<sizeof(Integer)>::Type;

struct Sum {
  template <class Integer>
  UNISONO_DEVICE static Integer combine(Integer a, Integer b) {
    return Integer(Wrapping<Integer>(a) + Wrapping<Integer>(b));
  }
  UNISONO_DEVICE static float combine(float a, float b) { return a + b; }
  UNISONO_DEVICE static double combine(double a, double b) { return a + b; }
  template <class Part>
  UNISONO_DEVICE static Complex<Part> combine(Complex<Part> a, Complex<Part> b) {
    return {a.real + b.real, a.imaginary + b.imaginary};
  }
};

struct Prod {
  template <class Integer>
  UNISONO_DEVICE static Integer combine(Integer a, Integer b) {
    return Integer(Wrapping<Integer>(a) * Wrapping<Integer>(b));
  }
  UNISONO_DEVICE static float combine(float a, float b) { return a * b; }
  UNISONO_DEVICE static double combine(double a, double b) { return a * b; }
  // Each product is rounded before the sum: the compiler is told not to fuse them.
  template <class Part>
  UNISONO_DEVICE static Complex<Part> combine(Complex<Part> a, Complex<Part> b) {
    return {a.real * b.real - a.imaginary * b.imaginary,
            a.real * b.imaginary + a.imaginary * b.real};
  }
};

UNISONO_DEVICE float nan(float) {
  return bits<float>(0x7fc00000u);
}
UNISONO_DEVICE double nan(double) {
  return bits<double>(u64(0x7ff8) << 48);
}

// NaN wins, as the positive quiet NaN. Of -0 and +0 the earlier one stays.
struct Min {
  template <class Integer>
  UNISONO_DEVICE static Integer combine(Integer a, Integer b) {
    return b < a ? b : a;
  }
  template <class Float>
  UNISONO_DEVICE static Float floats(Float a, Float b) {
    return a != a || b != b ? nan(a) : b < a ? b : a;
  }
  UNISONO_DEVICE static float combine(float a, float b) { return floats(a, b); }
  UNISONO_DEVICE static double combine(double a, double b) { return floats(a, b); }
};

struct Max {
  template <class Integer>
  UNISONO_DEVICE static Integer combine(Integer a, Integer b) {
    return b > a ? b : a;
  }
  template <class Float>
  UNISONO_DEVICE static Float floats(Float a, Float b) {
    return a != a || b != b ? nan(a) : b > a ? b : a;
  }
  UNISONO_DEVICE static float combine(float a, float b) { return floats(a, b); }
  UNISONO_DEVICE static double combine(double a, double b) { return floats(a, b); }
};

struct And {
  template <class Word>
  UNISONO_DEVICE static Word combine(Word a, Word b) {
    return a & b;
  }
};
struct Or {
  template <class Word>
  UNISONO_DEVICE static Word combine(Word a, Word b) {
    return a | b;
  }
};
struct Xor {
  template <class Word>
  UNISONO_DEVICE static Word combine(Word a, Word b) {
    return a ^ b;
  }
};

template <class Operator, class E>
struct Arithmetic {
  using Element = E;
  using Number = Accumulator<E>;
  UNISONO_DEVICE Number take(E element) const { return widen(element); }
  UNISONO_DEVICE Number fold(Number a, Number b) const { return Operator::combine(a, b); }
  UNISONO_DEVICE E finish(Number number) const { return Narrow<E>::from(number); }
};

// A share of a number.
UNISONO_DEVICE float share(float number, u32 ranks) {
  return number / float(ranks);
}
UNISONO_DEVICE double share(double number, u32 ranks) {
  return number / double(ranks);
}
template <class Part>
UNISONO_DEVICE Complex<Part> share(Complex<Part> number, u32 ranks) {
  return {share(number.real, ranks), share(number.imaginary, ranks)};
}

template <class E>
struct Average : Arithmetic<Sum, E> {
  u32 ranks;
  UNISONO_DEVICE explicit Average(u32 ranks) : ranks(ranks) {}
  UNISONO_DEVICE E finish(Accumulator<E> sum) const { return Narrow<E>::from(share(sum, ranks)); }
};

// The average of integers, whose sum need not fit their type: that of up to 16 bits is taken in 32,
// that of 32 bits in 64, and that of 64 bits in 128. It is cut toward zero. There are at most 64
// contributions.
template <class E, class Longer>
struct LongAverage {
  using Element = E;
  using Number = Longer;
  u32 ranks;
  UNISONO_DEVICE explicit LongAverage(u32 ranks) : ranks(ranks) {}
  UNISONO_DEVICE Longer take(E element) const { return Longer(element); }
  UNISONO_DEVICE Longer fold(Longer a, Longer b) const { return a + b; }
  UNISONO_DEVICE E finish(Longer sum) const { return E(i64(sum) / i64(ranks)); }
};
template <class E, unsigned BYTES = sizeof(E)>
struct WholeAverage : LongAverage<E, i32> {
  using LongAverage<E, i32>::LongAverage;
};
template <class E>
struct WholeAverage<E, 4> : LongAverage<E, i64> {
  using LongAverage<E, i64>::LongAverage;
};

// Two's complement of 128 bits.
struct Wide {
  u64 low, high;
};

template <class E>
struct WholeAverage<E, 8> {
  using Element = E;
  using Number = Wide;
  u32 ranks;
  UNISONO_DEVICE explicit WholeAverage(u32 ranks) : ranks(ranks) {}
  UNISONO_DEVICE Wide take(E element) const {
    if constexpr (E(-1) < E(0)) {
      if (element < 0) return {u64(element), ~u64(0)};
    }
    return {u64(element), 0};
  }
  UNISONO_DEVICE Wide fold(Wide a, Wide b) const {
    const u64 low = a.low + b.low;
    return {low, a.high + b.high + (low < a.low ? 1 : 0)};
  }
  // Long division of the magnitude bit by bit, in few registers: each bit of the quotient takes the
  // place of one of the lower word. The upper word is less than the contributions are.
  UNISONO_DEVICE E finish(Wide sum) const {
    const bool is_negative = sum.high >> 63 != 0;
    u64 quotient = is_negative ? 0 - sum.low : sum.low;
    u64 rest = u32(is_negative ? ~sum.high + (sum.low == 0 ? 1 : 0) : sum.high) % ranks;
    UNISONO_ROLLED
    for (int bit = 0; bit < 64; ++bit) {
      rest = rest << 1 | quotient >> 63;
      const bool fits = rest >= ranks;
      rest -= fits ? ranks : 0;
      quotient = quotient << 1 | (fits ? 1 : 0);
    }
    return E(is_negative ? 0 - quotient : quotient);
  }
};

template <class Operator, class E>
struct Bitwise {
  using Element = E;
  using Number = Wrapping<E>;
  UNISONO_DEVICE Number take(E element) const { return Number(element); }
  UNISONO_DEVICE Number fold(Number a, Number b) const { return Operator::combine(a, b); }
  UNISONO_DEVICE E finish(Number number) const { return E(number); }
};

// The numbers are truths, 0 or 1.
template <class Operator, class E>
struct Logical {
  using Element = E;
  using Number = u32;
  UNISONO_DEVICE u32 take(E element) const { return truth(element) ? 1 : 0; }
  UNISONO_DEVICE u32 fold(u32 a, u32 b) const { return Operator::combine(a, b); }
  UNISONO_DEVICE E finish(u32 number) const {
    return number != 0 ? Narrow<E>::from(1) : Narrow<E>::from(0);
  }
};
// Four bools in a word.
struct Bools {
  u32 bytes;
};
template <class Operator>
struct Logical<Operator, Bools> {
  using Element = Bools;
  using Number = u32;
  UNISONO_DEVICE u32 take(Bools element) const {
    // The sum carries into a byte's top bit where any of its lower ones is set.
    u32 any = ((element.bytes & 0x7f7f7f7f) + 0x7f7f7f7f) | element.bytes;
    return (any >> 7) & 0x01010101;
  }
  UNISONO_DEVICE u32 fold(u32 a, u32 b) const { return Operator::combine(a, b); }
  UNISONO_DEVICE Bools finish(u32 number) const { return Bools{number}; }
};

// The product with a factor common to all elements. There is one contribution, so nothing is
// folded.
template <class Number>
struct Scaling;
template <>
struct Scaling<float> {
  float factor;
  UNISONO_DEVICE explicit Scaling(double factor) : factor(float(factor)) {}
  UNISONO_DEVICE float of(float number) const { return number * factor; }
};
template <>
struct Scaling<double> {
  double factor;
  UNISONO_DEVICE explicit Scaling(double factor) : factor(factor) {}
  UNISONO_DEVICE double of(double number) const { return number * factor; }
};
template <class Part>
struct Scaling<Complex<Part>> : Scaling<Part> {
  UNISONO_DEVICE explicit Scaling(double factor) : Scaling<Part>(factor) {}
  UNISONO_DEVICE Complex<Part> of(Complex<Part> number) const {
    return {Scaling<Part>::of(number.real), Scaling<Part>::of(number.imaginary)};
  }
};

template <class E>
struct Scale {
  using Element = E;
  using Number = Accumulator<E>;
  Scaling<Number> scaling;
  UNISONO_DEVICE explicit Scale(double factor) : scaling(factor) {}
  UNISONO_DEVICE Number take(E element) const { return scaling.of(widen(element)); }
  UNISONO_DEVICE Number fold(Number product, Number) const { return product; }
  UNISONO_DEVICE E finish(Number product) const { return Narrow<E>::from(product); }
};
// A bool stays true unless the factor is zero.
template <class Bytes>
struct ScaleBools : Logical<And, Bytes> {
  u32 kept;
  UNISONO_DEVICE explicit ScaleBools(double factor) : kept(factor != 0 ? ~0u : 0) {}
  UNISONO_DEVICE u32 take(Bytes element) const { return Logical<And, Bytes>::take(element) & kept; }
};
template <>
struct Scale<Bool> : ScaleBools<Bool> {
  using ScaleBools<Bool>::ScaleBools;
};
template <>
struct Scale<Bools> : ScaleBools<Bools> {
  using ScaleBools<Bools>::ScaleBools;
};

// The rule for the lanes into which a vector of elements is divided.
template <class Rule>
struct Lanes {
  using Type = Rule;
};
template <class Operator, class E>
struct Lanes<Bitwise<Operator, E>> {
  using Type = Bitwise<Operator, u32>;
};
template <class Operator>
struct Lanes<Logical<Operator, Bool>> {
  using Type = Logical<Operator, Bools>;
};
template <>
struct Lanes<Scale<Bool>> {
  using Type = Scale<Bools>;
};

}  // namespace unisono
