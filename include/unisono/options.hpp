// The settings of a communicator and the options of an operation. Part of unisono.hpp.
#ifndef UNISONO_OPTIONS_HPP
#define UNISONO_OPTIONS_HPP

#include <unisono.h>
#include <unisono/errors.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace unisono {

// The settings a communicator is made with: Config().set("timeout", "30").
class Config {
 public:
  Config() { check(unisono_config_create(&handle_)); }
  ~Config() { unisono_config_destroy(handle_); }
  Config(Config&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Config& operator=(Config&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }

  Config& set(const std::string& name, const std::string& value) {
    check(unisono_config_set(handle_, name.c_str(), value.c_str()));
    return *this;
  }
  std::string value(const std::string& name) const {
    const char* text = nullptr;
    check(unisono_config_value(handle_, name.c_str(), &text));
    return text;
  }
  const unisono_config* handle() const noexcept { return handle_; }

 private:
  unisono_config* handle_ = nullptr;
};

namespace detail {

inline const unisono_config* handle(const Config* config) {
  return config == nullptr ? nullptr : config->handle();
}

}  // namespace detail

using Seconds = std::chrono::duration<double>;

// UNISONO_DEFAULT_STREAM: CUDA's legacy default stream.
inline void* default_stream() noexcept {
  return reinterpret_cast<void*>(std::uintptr_t{1});
}

// Further options of an operation: Options().timeout(std::chrono::seconds(3)).
class Options {
 public:
  Options() = default;

  // Of buffers on a CUDA device, a cudaStream_t or default_stream(): the call then puts the
  // operation into the stream and returns. Such a buffer is a View of an address of the device.
  Options& stream(void* stream) {
    options_.stream = stream;
    return *this;
  }
  // How long it may take; without it, as long as the communicator says.
  Options& timeout(Seconds limit) {
    options_.timeout = limit.count();
    return *this;
  }
  Options& no_timeout() {
    options_.timeout = UNISONO_FOREVER;
    return *this;
  }
  // Of UNISONO_PREMUL_SUM.
  Options& factor(double factor) {
    options_.factor = factor;
    return *this;
  }
  // Where `recv` and `sendrecv` write how many elements have come.
  Options& received(std::size_t& count) {
    options_.received = &count;
    return *this;
  }
  const unisono_options* get() const noexcept { return &options_; }

 private:
  unisono_options options_ = UNISONO_OPTIONS_INIT;
};

}  // namespace unisono

#endif
