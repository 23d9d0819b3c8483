// Memory that each rank exposes to the others. Part of unisono.hpp.
#ifndef UNISONO_WINDOW_HPP
#define UNISONO_WINDOW_HPP

#include <unisono.h>
#include <unisono/buffers.hpp>
#include <unisono/communicator.hpp>
#include <unisono/errors.hpp>
#include <unisono/options.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace unisono {

// The memory of all ranks, of elements of one type. Offsets and counts are of elements. To end it
// well, all ranks call fence() before it goes.
template <class T>
class Window final {
  static_assert(std::is_trivially_copyable<T>::value, "others copy its bytes");

 public:
  // Exposes `count` elements, which stay there until the window goes. All ranks call it.
  Window(const Communicator& comm, T* memory, std::size_t count) {
    check(unisono_window_create(comm.handle(), memory, count * sizeof(T), &handle_));
  }
  ~Window() { unisono_window_destroy(handle_); }
  Window(Window&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Window& operator=(Window&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }

  // How many elements a rank exposes.
  std::size_t size(int rank) const {
    std::size_t bytes = 0;
    check(unisono_window_bytes(handle_, rank, &bytes));
    return bytes / sizeof(T);
  }

  // Writes to rank `to`; the elements are there when it returns.
  void put(const T* source, std::size_t count, int to, std::size_t offset = 0) const {
    check(unisono_window_put(handle_, source, count * sizeof(T), to, offset * sizeof(T)));
  }

  // Reads from rank `from`.
  void get(T* target, std::size_t count, int from, std::size_t offset = 0) const {
    check(unisono_window_get(handle_, target, count * sizeof(T), from, offset * sizeof(T)));
  }

  // Elements that were put before are there when the wait of rank `to` returns.
  void signal(int to) const { check(unisono_window_signal(handle_, to)); }

  // Waits for a signal, and takes it. An error TIMEOUT says that none has come in time.
  void wait_signal(int from, Seconds limit = Seconds(UNISONO_FOREVER)) const {
    check(unisono_window_wait_signal(handle_, from, limit.count()));
  }

  // The memory of another rank of this host, as long as the window is there.
  T* map(int rank) const {
    void* memory = nullptr;
    check(unisono_window_map(handle_, rank, &memory));
    return static_cast<T*>(memory);
  }

  // Waits until all ranks have called it: what any has put before is there then.
  void fence() const { check(unisono_window_fence(handle_)); }

  unisono_window* handle() const noexcept { return handle_; }

 private:
  unisono_window* handle_ = nullptr;
};

}  // namespace unisono

#endif
