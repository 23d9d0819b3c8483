/*
 * Elements of every type from small numbers and back, and what a reduction of them must be: written
 * apart from the library, with the formats spelled out.
 */
#ifndef ELEMENT_H
#define ELEMENT_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <unisono.h>

enum { DTYPES = 17, LARGEST_ELEMENT = 16 };

static const struct {
  const char* name;
  size_t size;
  int exponent, mantissa; /* bits, of the small floats */
  char kind;              /* f float, h small float, i signed, u unsigned, b bool, c complex */
} TYPES[DTYPES + 1] = {
    {"none", 0, 0, 0, 0},          {"float16", 2, 5, 10, 'h'},  {"bfloat16", 2, 8, 7, 'h'},
    {"float32", 4, 0, 0, 'f'},     {"float64", 8, 0, 0, 'f'},   {"float8_e4m3fn", 1, 4, 3, 'h'},
    {"float8_e5m2", 1, 5, 2, 'h'}, {"int8", 1, 0, 0, 'i'},      {"int16", 2, 0, 0, 'i'},
    {"int32", 4, 0, 0, 'i'},       {"int64", 8, 0, 0, 'i'},     {"uint8", 1, 0, 0, 'u'},
    {"uint16", 2, 0, 0, 'u'},      {"uint32", 4, 0, 0, 'u'},    {"uint64", 8, 0, 0, 'u'},
    {"bool", 1, 0, 0, 'b'},        {"complex64", 8, 0, 0, 'c'}, {"complex128", 16, 0, 0, 'c'}};

static const char* const OP_NAMES[] = {"none", "sum",  "avg",  "prod", "min",  "max",       "band",
                                       "bor",  "bxor", "land", "lor",  "lxor", "premul_sum"};

enum { OPS = sizeof OP_NAMES / sizeof *OP_NAMES - 1 };

/* A number, with a part that only complex ones have. */
struct number {
  double real, imaginary;
};

static inline struct number real_number(double value) {
  const struct number number = {value, 0};
  return number;
}

/* Writes `value`, which the type can hold exactly. */
static inline void put_element(unisono_dtype dtype, void* to, struct number value) {
  const size_t size = TYPES[dtype].size;
  if (TYPES[dtype].kind == 'c' && size == 8) {
    const float parts[2] = {(float)value.real, (float)value.imaginary};
    memcpy(to, parts, sizeof parts);
  } else if (TYPES[dtype].kind == 'c') {
    const double parts[2] = {value.real, value.imaginary};
    memcpy(to, parts, sizeof parts);
  } else if (dtype == UNISONO_FLOAT32) {
    const float number = (float)value.real;
    memcpy(to, &number, sizeof number);
  } else if (dtype == UNISONO_FLOAT64) {
    memcpy(to, &value.real, sizeof value.real);
  } else if (TYPES[dtype].kind == 'h') {
    uint16_t bits = 0;
    if (value.real != 0) {
      int exponent = 0;
      const double fraction = frexp(fabs(value.real), &exponent); /* 0.5 to 1 */
      const int bias = (1 << (TYPES[dtype].exponent - 1)) - 1;
      const unsigned mantissa = (unsigned)ldexp(2 * fraction - 1, TYPES[dtype].mantissa);
      bits = (uint16_t)((unsigned)(exponent - 1 + bias) << TYPES[dtype].mantissa | mantissa);
      if (value.real < 0) bits |= (uint16_t)(1U << (8 * size - 1));
    }
    memcpy(to, &bits, size); /* little-endian */
  } else {
    const int64_t number = (int64_t)value.real;
    memcpy(to, &number, size);
  }
}

static inline struct number take_element(unisono_dtype dtype, const void* from) {
  const size_t size = TYPES[dtype].size;
  struct number value = {0, 0};
  if (TYPES[dtype].kind == 'c' && size == 8) {
    float parts[2];
    memcpy(parts, from, sizeof parts);
    value.real = parts[0];
    value.imaginary = parts[1];
  } else if (TYPES[dtype].kind == 'c') {
    double parts[2];
    memcpy(parts, from, sizeof parts);
    value.real = parts[0];
    value.imaginary = parts[1];
  } else if (dtype == UNISONO_FLOAT32) {
    float number;
    memcpy(&number, from, sizeof number);
    value.real = number;
  } else if (dtype == UNISONO_FLOAT64) {
    memcpy(&value.real, from, sizeof value.real);
  } else if (TYPES[dtype].kind == 'h') {
    uint16_t bits = 0;
    memcpy(&bits, from, size);
    const unsigned magnitude = bits & ((1U << (8 * size - 1)) - 1);
    const int exponent = (int)(magnitude >> TYPES[dtype].mantissa);
    const unsigned mantissa = magnitude & ((1U << TYPES[dtype].mantissa) - 1);
    const int bias = (1 << (TYPES[dtype].exponent - 1)) - 1;
    if (magnitude) value.real = ldexp(1 + ldexp(mantissa, -TYPES[dtype].mantissa), exponent - bias);
    if (bits >> (8 * size - 1)) value.real = -value.real;
  } else {
    uint64_t bits = 0;
    memcpy(&bits, from, size);
    if (TYPES[dtype].kind == 'i' && size < 8 && bits >> (8 * size - 1))
      bits |= ~UINT64_C(0) << (8 * size);
    value.real = TYPES[dtype].kind == 'i' ? (double)(int64_t)bits : (double)bits;
  }
  return value;
}

static inline int has_meaning(unisono_op op, unisono_dtype dtype) {
  const char kind = TYPES[dtype].kind;
  switch (op) {
    case UNISONO_SUM:
    case UNISONO_PROD:
      return 1;
    case UNISONO_AVG:
      return kind != 'b';
    case UNISONO_PREMUL_SUM:
      return kind == 'f' || kind == 'h' || kind == 'c';
    case UNISONO_BAND:
    case UNISONO_BOR:
    case UNISONO_BXOR:
      return kind == 'i' || kind == 'u' || kind == 'b';
    default:
      return kind != 'c';
  }
}

/* Rank `rank`'s element `index`: small, so that results are exact in every type. */
static inline struct number contribution(unisono_dtype dtype, unisono_op op, int rank, int world,
                                         size_t index) {
  struct number value = {1 + (double)((rank + index) % 2), 0};
  if (op == UNISONO_AVG) value.real = (size_t)rank == index % (size_t)world ? 2.0 * world : 0;
  if (op >= UNISONO_BAND && op <= UNISONO_LXOR) value.real = (double)((rank + index) % 3);
  if (TYPES[dtype].kind == 'b') value.real = (double)((rank + index) % 3 == 0);
  if (TYPES[dtype].kind == 'c') value.imaginary = -value.real;
  return value;
}

/* The factor of `rank` for PREMUL_SUM. */
static inline double factor_of(int rank) {
  return rank % 2 ? 2.0 : 1.0;
}

/* Of the ranks from 0 on, as many as `of`. */
static inline struct number reduced_of(unisono_dtype dtype, unisono_op op, int of, int world,
                                       size_t index) {
  struct number all = contribution(dtype, op, 0, world, index);
  const int is_bool = TYPES[dtype].kind == 'b';
  if (op >= UNISONO_LAND && op <= UNISONO_LXOR) all.real = all.real != 0;
  if (op == UNISONO_PREMUL_SUM) {
    all.real *= factor_of(0);
    all.imaginary *= factor_of(0);
  }
  for (int rank = 1; rank < of; rank++) {
    const struct number one = contribution(dtype, op, rank, world, index);
    const double factor = op == UNISONO_PREMUL_SUM ? factor_of(rank) : 1;
    const struct number before = all;
    switch (op) {
      case UNISONO_SUM:
      case UNISONO_AVG:
      case UNISONO_PREMUL_SUM:
        all.real += factor * one.real;
        all.imaginary += factor * one.imaginary;
        break;
      case UNISONO_PROD:
        all.real = before.real * one.real - before.imaginary * one.imaginary;
        all.imaginary = before.real * one.imaginary + before.imaginary * one.real;
        break;
      case UNISONO_MIN:
        all.real = fmin(all.real, one.real);
        break;
      case UNISONO_MAX:
        all.real = fmax(all.real, one.real);
        break;
      case UNISONO_BAND:
        all.real = (double)((int64_t)all.real & (int64_t)one.real);
        break;
      case UNISONO_BOR:
        all.real = (double)((int64_t)all.real | (int64_t)one.real);
        break;
      case UNISONO_BXOR:
        all.real = (double)((int64_t)all.real ^ (int64_t)one.real);
        break;
      case UNISONO_LAND:
        all.real = all.real != 0 && one.real != 0;
        break;
      case UNISONO_LOR:
        all.real = all.real != 0 || one.real != 0;
        break;
      case UNISONO_LXOR:
        all.real = (all.real != 0) != (one.real != 0);
        break;
    }
  }
  if (op == UNISONO_AVG) {
    all.real /= of;
    all.imaginary /= of;
  }
  if (is_bool) all.real = all.real != 0;
  return all;
}

static inline struct number reduced(unisono_dtype dtype, unisono_op op, int world, size_t index) {
  return reduced_of(dtype, op, world, world, index);
}

#endif
