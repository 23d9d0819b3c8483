// Waiting for operations: one, several, and groups of calls. Part of unisono.hpp.
#ifndef UNISONO_WORK_HPP
#define UNISONO_WORK_HPP

#include <unisono.h>
#include <unisono/errors.hpp>
#include <unisono/options.hpp>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

namespace unisono {

// An operation under way. Like a future of std::async it waits for the end when it goes, because
// the operation uses memory that may go next.
class [[nodiscard]] Work {
 public:
  Work() = default;
  explicit Work(unisono_work* handle) : handle_(handle) {}
  ~Work() { finish(); }
  Work(Work&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Work& operator=(Work&& other) noexcept {
    if (this != &other) {
      finish();
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }

  // Whether there is an operation.
  bool valid() const noexcept { return handle_ != nullptr; }

  // Whether it has ended; throws how, if not well.
  bool done() const {
    std::int32_t done = 0;
    check(unisono_work_test(handle_, &done));
    return done != 0;
  }

  // Waits for the end.
  void wait() const { check(unisono_work_wait(handle_, UNISONO_FOREVER)); }

  // Waits for the end, at most so long. Whether it has come.
  bool wait_for(Seconds limit) const {
    const unisono_status status = unisono_work_wait(handle_, limit.count() < 0 ? 0 : limit.count());
    return !detail_timed_out(status);
  }

  // The rank that a received message came from.
  int source() const {
    std::int32_t source = -1;
    check(unisono_work_source(handle_, &source));
    return source;
  }

  // How many elements of a received message have come.
  std::size_t received() const {
    std::size_t count = 0;
    check(unisono_work_received(handle_, &count));
    return count;
  }

  unisono_work* handle() const noexcept { return handle_; }

  // Gives the handle to the caller, who destroys it.
  unisono_work* release() noexcept { return std::exchange(handle_, nullptr); }

  // Whether `status` is that of a wait that was over before the operation. Throws for other
  // failures.
  static bool detail_timed_out(unisono_status status) {
    if (status == UNISONO_TIMEOUT) {
      unisono_error error = UNISONO_ERROR_INIT;
      unisono_last_error(&error);
      if (error.fatal == 0) return true;
    }
    check(status);
    return false;
  }

 private:
  void finish() noexcept {
    if (handle_ == nullptr) return;
    // How it ended does not matter here.
    unisono_work_wait(handle_, UNISONO_FOREVER);
    unisono_work_destroy(handle_);
    handle_ = nullptr;
  }

  unisono_work* handle_ = nullptr;
};

namespace detail {

template <class Works>
std::vector<unisono_work*> handles(const Works& works) {
  std::vector<unisono_work*> all;
  for (const Work& work : works) all.push_back(work.handle());
  return all;
}

}  // namespace detail

// Waits for all of them. Throws the first failure.
template <class Works>
void wait_all(const Works& works) {
  const auto all = detail::handles(works);
  check(unisono_work_wait_all(all.data(), all.size(), UNISONO_FOREVER));
}

inline void wait_all(std::initializer_list<const Work*> works) {
  std::vector<unisono_work*> all;
  for (const Work* work : works) all.push_back(work->handle());
  check(unisono_work_wait_all(all.data(), all.size(), UNISONO_FOREVER));
}

// The index of the first of them that has ended; those that are not valid() are skipped. Nothing
// when the time is up. Throws the failure of one that failed, whose index() says which: take it out
// before waiting for the others.
template <class Works>
std::optional<std::size_t> wait_any(const Works& works, Seconds limit = Seconds(UNISONO_FOREVER)) {
  const auto all = detail::handles(works);
  std::size_t index = SIZE_MAX;
  const unisono_status status =
      unisono_work_wait_any(all.data(), all.size(), limit.count(), &index);
  try {
    if (Work::detail_timed_out(status)) return std::nullopt;
  } catch (const Error& error) {
    if (index == SIZE_MAX) throw;
    throw error.at(index);
  }
  return index;
}

// Between its making and end(), calls of this thread that would block are started instead. end()
// waits for all; without it, the destructor does, and is silent of failures.
class Group {
 public:
  Group() { check(unisono_group_start()); }
  ~Group() {
    if (open_) unisono_group_end(nullptr);
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  void end() {
    open_ = false;
    check(unisono_group_end(nullptr));
  }
  // Does not wait, but returns what to wait on.
  Work end_async() {
    unisono_work* work = nullptr;
    open_ = false;
    check(unisono_group_end(&work));
    return Work(work);
  }

 private:
  bool open_ = true;
};

}  // namespace unisono

#endif
