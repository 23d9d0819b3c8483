// Failures as exceptions. Part of unisono.hpp.
#ifndef UNISONO_ERRORS_HPP
#define UNISONO_ERRORS_HPP

#include <unisono.h>

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>

namespace unisono {

// A failure: its message, and whether the communicator is dead.
class Error : public std::runtime_error {
 public:
  Error(unisono_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}

  explicit Error(const unisono_error& error)
      : std::runtime_error(error.message),
        status_(error.status),
        fatal_(error.fatal != 0),
        peer_(error.peer < 0 ? std::nullopt : std::optional<int>(error.peer)),
        operation_(error.operation == nullptr ? "" : error.operation) {}

  unisono_status status() const noexcept { return status_; }

  // Whether the communicator is dead.
  bool fatal() const noexcept { return fatal_; }

  // The rank that caused it, if another one did.
  std::optional<int> peer() const noexcept { return peer_; }

  // Such as "all_reduce #17"; empty if it was none.
  const std::string& operation() const noexcept { return operation_; }

  // Of wait_any: which of the operations it was that failed.
  std::optional<std::size_t> index() const noexcept { return index_; }

  // The same error, of operation `index` of several.
  Error at(std::size_t index) const {
    Error error = *this;
    error.index_ = index;
    return error;
  }

 private:
  unisono_status status_;
  bool fatal_ = false;
  std::optional<int> peer_;
  std::string operation_;
  std::optional<std::size_t> index_;
};

// Throws what the last call on this thread failed with, unless `status` is UNISONO_OK.
inline void check(unisono_status status) {
  if (status == UNISONO_OK) return;
  unisono_error error = UNISONO_ERROR_INIT;
  unisono_last_error(&error);
  throw Error(error);
}

namespace detail {

inline void require(bool condition, const char* what) {
  if (!condition) throw Error(UNISONO_INVALID_ARGUMENT, what);
}

}  // namespace detail

}  // namespace unisono

#endif
