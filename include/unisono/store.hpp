// The ways in which ranks meet: a unique id, or a store of the program's. Part of unisono.hpp.
#ifndef UNISONO_STORE_HPP
#define UNISONO_STORE_HPP

#include <unisono.h>
#include <unisono/errors.hpp>
#include <unisono/options.hpp>

#include <cstddef>
#include <cstring>
#include <exception>
#include <optional>
#include <string>

namespace unisono {

using UniqueId = unisono_unique_id;

// Made by one rank and passed to the others, who join by Communicator::from_id.
inline UniqueId make_unique_id(const Config* config = nullptr) {
  UniqueId id;
  check(unisono_unique_id_create(detail::handle(config), &id));
  return id;
}

// A key-value store of yours that all ranks reach. Joining throws what its functions throw.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // The value, if it is set now.
  virtual std::optional<std::string> get(const std::string& key) = 0;
  // The value, as soon as it is set; nothing when the time is up.
  virtual std::optional<std::string> wait(const std::string& key, Seconds limit) = 0;
};

namespace detail {

// A store of C, and what its functions threw.
struct StoreCalls {
  Store& store;
  std::exception_ptr thrown = nullptr;

  template <class Call>
  unisono_status guard(const Call& call) noexcept {
    try {
      return call();
    } catch (...) {
      thrown = std::current_exception();
      return UNISONO_SYSTEM;
    }
  }

  static unisono_status give(const std::optional<std::string>& found, void* value,
                             std::size_t capacity, std::size_t* length) {
    *length = found ? found->size() : UNISONO_NOT_SET;
    if (found && !found->empty() && found->size() <= capacity) {
      std::memcpy(value, found->data(), found->size());
    }
    return UNISONO_OK;
  }

  static unisono_status set(void* context, const char* key, const void* value, std::size_t length) {
    auto& self = *static_cast<StoreCalls*>(context);
    return self.guard([&] {
      self.store.set(key, std::string(static_cast<const char*>(value), length));
      return UNISONO_OK;
    });
  }
  static unisono_status get(void* context, const char* key, void* value, std::size_t capacity,
                            std::size_t* length) {
    auto& self = *static_cast<StoreCalls*>(context);
    return self.guard([&] { return give(self.store.get(key), value, capacity, length); });
  }
  static unisono_status wait(void* context, const char* key, double seconds, void* value,
                             std::size_t capacity, std::size_t* length) {
    auto& self = *static_cast<StoreCalls*>(context);
    return self.guard([&] {
      const auto found = self.store.wait(key, Seconds(seconds));
      return found ? give(found, value, capacity, length) : UNISONO_TIMEOUT;
    });
  }
};

}  // namespace detail

}  // namespace unisono

#endif
