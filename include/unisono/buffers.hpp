// Buffers: element types, views, and memory of the shared heap. Part of unisono.hpp.
#ifndef UNISONO_BUFFERS_HPP
#define UNISONO_BUFFERS_HPP

#include <unisono.h>

#include <complex>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <new>
#include <type_traits>
#include <utility>

namespace unisono {

// The element type that T is. For a type of your own (a 16-bit float, say):
//   template <> struct unisono::dtype_of<Half> : unisono::dtype_is<UNISONO_FLOAT16> {};
template <class T, class = void>
struct dtype_of;

template <unisono_dtype Dtype>
struct dtype_is {
  static constexpr unisono_dtype value = Dtype;
};

template <>
struct dtype_of<float> : dtype_is<UNISONO_FLOAT32> {};
template <>
struct dtype_of<double> : dtype_is<UNISONO_FLOAT64> {};
template <>
struct dtype_of<bool> : dtype_is<UNISONO_BOOL> {};
template <>
struct dtype_of<std::byte> : dtype_is<UNISONO_UINT8> {};
template <>
struct dtype_of<std::complex<float>> : dtype_is<UNISONO_COMPLEX64> {};
template <>
struct dtype_of<std::complex<double>> : dtype_is<UNISONO_COMPLEX128> {};

// Integers by their size and sign, whatever they are called.
template <class T>
struct dtype_of<T, std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool>>> {
 private:
  static_assert(sizeof(T) <= 8, "there is no such type of integers");
  static constexpr bool is_signed = std::is_signed_v<T>;

 public:
  static constexpr unisono_dtype value =
      sizeof(T) == 1   ? (is_signed ? UNISONO_INT8 : UNISONO_UINT8)
      : sizeof(T) == 2 ? (is_signed ? UNISONO_INT16 : UNISONO_UINT16)
      : sizeof(T) == 4 ? (is_signed ? UNISONO_INT32 : UNISONO_UINT32)
                       : (is_signed ? UNISONO_INT64 : UNISONO_UINT64);
};

// Memory that something else owns: `size` elements from `data` on. Copied as it is.
template <class T>
class View {
 public:
  View() = default;
  View(T* data, std::size_t size) : data_(data), size_(size) {}

  T* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  T* begin() const noexcept { return data_; }
  T* end() const noexcept { return data_ + size_; }
  T& operator[](std::size_t index) const { return data_[index]; }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

template <class T>
View(T*, std::size_t) -> View<T>;

// The elements of anything contiguous.
template <class Range>
auto view(Range&& range) -> View<std::remove_pointer_t<decltype(std::data(range))>> {
  return {std::data(range), std::size(range)};
}

namespace detail {

template <class Range>
using element = std::remove_pointer_t<decltype(std::data(std::declval<Range&>()))>;

// Two buffers of one operation, whose elements have one type.
template <class Input, class Output>
constexpr unisono_dtype common_dtype() {
  using In = std::remove_cv_t<element<Input>>;
  using Out = std::remove_cv_t<element<Output>>;
  static_assert(std::is_same_v<In, Out>, "input and output have elements of different types");
  static_assert(!std::is_const_v<element<Output>>, "the output is constant");
  return dtype_of<Out>::value;
}

template <class Buffer>
constexpr unisono_dtype dtype() {
  return dtype_of<std::remove_cv_t<element<Buffer>>>::value;
}

inline std::size_t sum(View<const std::size_t> counts) {
  std::size_t all = 0;
  for (const std::size_t count : counts) all += count;
  return all;
}

}  // namespace detail

// Memory that the other processes of the host read where it lies:
//   std::vector<float, unisono::Allocator<float>> gradients(n);
template <class T>
struct Allocator {
  using value_type = T;

  Allocator() = default;
  template <class U>
  Allocator(const Allocator<U>& /*other*/) noexcept {}

  T* allocate(std::size_t count) {
    void* memory = nullptr;
    if (count > SIZE_MAX / sizeof(T)) throw std::bad_array_new_length();
    if (unisono_mem_alloc(count * sizeof(T), &memory) != UNISONO_OK) throw std::bad_alloc();
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t /*count*/) noexcept { unisono_mem_free(memory); }

  template <class U>
  bool operator==(const Allocator<U>& /*other*/) const noexcept {
    return true;
  }
  template <class U>
  bool operator!=(const Allocator<U>& /*other*/) const noexcept {
    return false;
  }
};

}  // namespace unisono

#endif
