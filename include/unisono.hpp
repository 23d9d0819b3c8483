// unisono for C++17: what unisono.h has, with owners, views, exceptions and something to wait on.
//
//   auto comm = unisono::Communicator::from_environment();
//   std::vector<float> x(1024, 1.0F);
//   comm.all_reduce(x, UNISONO_SUM);                       // blocks
//   auto work = comm.async().all_reduce(x, UNISONO_SUM);   // goes on
//   work.wait();
//
// Header only; it adds nothing to the ABI. What unisono.h says of order, threads and buffers holds
// here. Whatever is contiguous and has data() and size() is a buffer (vector, array, string, span,
// a C array, a View of memory of your own); its elements are those of dtype_of, which you may add
// to. Sizes are checked against each other. Every failure is thrown as an Error.
#ifndef UNISONO_HPP
#define UNISONO_HPP

#include <unisono.h>

#include <chrono>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace unisono {

// ---- Errors ----

// What went wrong, in words, and what it is the end of.
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

// ---- Elements and views ----

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

// ---- Settings and options ----

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

using Seconds = std::chrono::duration<double>;

// UNISONO_DEFAULT_STREAM: CUDA's legacy default stream.
inline void* default_stream() noexcept {
  return reinterpret_cast<void*>(std::uintptr_t{1});
}

// What an operation takes besides: Options().timeout(std::chrono::seconds(3)).
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
  const unisono_options* get() const noexcept { return &options_; }

 private:
  unisono_options options_ = UNISONO_OPTIONS_INIT;
};

// ---- Work ----

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

// ---- Operations ----

// The collectives, for a class that can run a call: blocking (Communicator) or started (Async).
// `buffer`, `input` and `output` are anything that view() takes.
template <class Runner>
class Operations {
 public:
  // Every rank's buffer becomes the reduction of all.
  template <class Buffer>
  auto all_reduce(Buffer&& buffer, unisono_op op, const Options& options = {}) const {
    return all_reduce(buffer, buffer, op, options);
  }
  template <class Input, class Output, class = detail::element<Output>>
  auto all_reduce(const Input& input, Output&& output, unisono_op op,
                  const Options& options = {}) const {
    constexpr auto dtype = detail::common_dtype<const Input, Output>();
    const auto in = view(input);
    const auto out = view(output);
    detail::require(in.size() == out.size(), "all_reduce: input and output differ in size");
    return run([&](unisono_work** work) {
      return unisono_all_reduce(comm(), in.data(), out.data(), out.size(), dtype, op, options.get(),
                                work);
    });
  }

  // The root's buffer becomes the reduction of all; the others' stay as they are.
  template <class Buffer>
  auto reduce(Buffer&& buffer, unisono_op op, int root, const Options& options = {}) const {
    return reduce(buffer, buffer, op, root, options);
  }
  // The output of other ranks than the root is ignored and may be empty.
  template <class Input, class Output, class = detail::element<Output>>
  auto reduce(const Input& input, Output&& output, unisono_op op, int root,
              const Options& options = {}) const {
    constexpr auto dtype = detail::common_dtype<const Input, Output>();
    const auto in = view(input);
    const auto out = view(output);
    detail::require(rank() != root || in.size() == out.size(),
                    "reduce: input and output differ in size");
    return run([&](unisono_work** work) {
      return unisono_reduce(comm(), in.data(), out.data(), in.size(), dtype, op, root,
                            options.get(), work);
    });
  }

  // Every rank's buffer becomes the root's.
  template <class Buffer>
  auto broadcast(Buffer&& buffer, int root, const Options& options = {}) const {
    constexpr auto dtype = detail::common_dtype<Buffer, Buffer>();
    const auto all = view(buffer);
    return run([&](unisono_work** work) {
      return unisono_broadcast(comm(), all.data(), all.size(), dtype, root, options.get(), work);
    });
  }

  // The output becomes the inputs by rank.
  template <class Input, class Output>
  auto all_gather(const Input& input, Output&& output, const Options& options = {}) const {
    constexpr auto dtype = detail::common_dtype<const Input, Output>();
    const auto in = view(input);
    const auto out = view(output);
    detail::require(out.size() == in.size() * world(),
                    "all_gather: the output needs world_size times the input's elements");
    return run([&](unisono_work** work) {
      return unisono_all_gather(comm(), in.data(), out.data(), in.size(), dtype, options.get(),
                                work);
    });
  }

  // As all_gather, with counts[r] elements from rank r.
  template <class Input, class Output, class Counts>
  auto all_gather_v(const Input& input, Output&& output, const Counts& counts,
                    const Options& options = {}) const {
    constexpr auto dtype = detail::common_dtype<const Input, Output>();
    const auto in = view(input);
    const auto out = view(output);
    const View<const std::size_t> each = counts_view(counts);
    detail::require(in.size() == each[rank()] && out.size() == detail::sum(each),
                    "all_gather_v: the buffers do not have the sizes that the counts call for");
    return run([&](unisono_work** work) {
      return unisono_all_gather_v(comm(), in.data(), out.data(), each.data(), dtype, options.get(),
                                  work);
    });
  }

  // The output becomes this rank's block of the reduction of the inputs.
  template <class Input, class Output>
  auto reduce_scatter(const Input& input, Output&& output, unisono_op op,
                      const Options& options = {}) const {
    constexpr auto dtype = detail::common_dtype<const Input, Output>();
    const auto in = view(input);
    const auto out = view(output);
    detail::require(in.size() == out.size() * world(),
                    "reduce_scatter: the input needs world_size times the output's elements");
    return run([&](unisono_work** work) {
      return unisono_reduce_scatter(comm(), in.data(), out.data(), out.size(), dtype, op,
                                    options.get(), work);
    });
  }

  // As reduce_scatter, with counts[r] elements for rank r.
  template <class Input, class Output, class Counts>
  auto reduce_scatter_v(const Input& input, Output&& output, const Counts& counts, unisono_op op,
                        const Options& options = {}) const {
    constexpr auto dtype = detail::common_dtype<const Input, Output>();
    const auto in = view(input);
    const auto out = view(output);
    const View<const std::size_t> each = counts_view(counts);
    detail::require(out.size() == each[rank()] && in.size() == detail::sum(each),
                    "reduce_scatter_v: the buffers do not have the sizes that the counts call for");
    return run([&](unisono_work** work) {
      return unisono_reduce_scatter_v(comm(), in.data(), out.data(), each.data(), dtype, op,
                                      options.get(), work);
    });
  }

  // The root's output becomes the inputs by rank; the others' is ignored and may be empty.
  template <class Input, class Output>
  auto gather(const Input& input, Output&& output, int root, const Options& options = {}) const {
    constexpr auto dtype = detail::common_dtype<const Input, Output>();
    const auto in = view(input);
    const auto out = view(output);
    detail::require(rank() != root || out.size() == in.size() * world(),
                    "gather: the root's output needs world_size times the input's elements");
    return run([&](unisono_work** work) {
      return unisono_gather(comm(), in.data(), out.data(), in.size(), dtype, root, options.get(),
                            work);
    });
  }

  // As gather, with counts[r] elements from rank r, which the root alone needs to know.
  template <class Input, class Output, class Counts>
  auto gather_v(const Input& input, Output&& output, const Counts& counts, int root,
                const Options& options = {}) const {
    constexpr auto dtype = detail::common_dtype<const Input, Output>();
    const auto in = view(input);
    const auto out = view(output);
    View<const std::size_t> each;
    if (rank() == root) {
      each = counts_view(counts);
      detail::require(out.size() == detail::sum(each),
                      "gather_v: the root's output does not have the size of all counts");
    }
    return run([&](unisono_work** work) {
      return unisono_gather_v(comm(), in.data(), in.size(), out.data(), each.data(), dtype, root,
                              options.get(), work);
    });
  }

  // The output becomes this rank's block of the root's input; the others' is ignored.
  template <class Input, class Output>
  auto scatter(const Input& input, Output&& output, int root, const Options& options = {}) const {
    constexpr auto dtype = detail::common_dtype<const Input, Output>();
    const auto in = view(input);
    const auto out = view(output);
    detail::require(rank() != root || in.size() == out.size() * world(),
                    "scatter: the root's input needs world_size times the output's elements");
    return run([&](unisono_work** work) {
      return unisono_scatter(comm(), in.data(), out.data(), out.size(), dtype, root, options.get(),
                             work);
    });
  }

  // As scatter, with counts[r] elements for rank r, which the root alone needs to know.
  template <class Input, class Output, class Counts>
  auto scatter_v(const Input& input, const Counts& counts, Output&& output, int root,
                 const Options& options = {}) const {
    constexpr auto dtype = detail::common_dtype<const Input, Output>();
    const auto in = view(input);
    const auto out = view(output);
    View<const std::size_t> each;
    if (rank() == root) {
      each = counts_view(counts);
      detail::require(in.size() == detail::sum(each),
                      "scatter_v: the root's input does not have the size of all counts");
    }
    return run([&](unisono_work** work) {
      return unisono_scatter_v(comm(), in.data(), each.data(), out.data(), out.size(), dtype, root,
                               options.get(), work);
    });
  }

  // Block r of the input goes to rank r, block r of the output comes from it.
  template <class Input, class Output>
  auto all_to_all(const Input& input, Output&& output, const Options& options = {}) const {
    constexpr auto dtype = detail::common_dtype<const Input, Output>();
    const auto in = view(input);
    const auto out = view(output);
    detail::require(in.size() == out.size() && in.size() % world() == 0,
                    "all_to_all: input and output need the same number of elements for each rank");
    return run([&](unisono_work** work) {
      return unisono_all_to_all(comm(), in.data(), out.data(), in.size() / world(), dtype,
                                options.get(), work);
    });
  }

  // As all_to_all, with send_counts[r] elements to rank r and receive_counts[r] from it.
  template <class Input, class Output, class SendCounts, class ReceiveCounts>
  auto all_to_all_v(const Input& input, const SendCounts& send_counts, Output&& output,
                    const ReceiveCounts& receive_counts, const Options& options = {}) const {
    constexpr auto dtype = detail::common_dtype<const Input, Output>();
    const auto in = view(input);
    const auto out = view(output);
    const View<const std::size_t> send = counts_view(send_counts);
    const View<const std::size_t> receive = counts_view(receive_counts);
    detail::require(in.size() == detail::sum(send) && out.size() == detail::sum(receive),
                    "all_to_all_v: the buffers do not have the sizes that the counts call for");
    return run([&](unisono_work** work) {
      return unisono_all_to_all_v(comm(), in.data(), send.data(), out.data(), receive.data(), dtype,
                                  options.get(), work);
    });
  }

  // Returns when all ranks have called it.
  auto barrier(const Options& options = {}) const {
    return run([&](unisono_work** work) { return unisono_barrier(comm(), options.get(), work); });
  }

 protected:
  ~Operations() = default;

 private:
  template <class Call>
  auto run(const Call& call) const {
    return static_cast<const Runner&>(*this).run_call(call);
  }
  unisono_communicator* comm() const { return static_cast<const Runner&>(*this).handle(); }
  int rank() const {
    std::int32_t rank = -1;
    check(unisono_communicator_rank(comm(), &rank));
    return rank;
  }
  std::size_t world() const {
    std::int32_t size = 0;
    check(unisono_communicator_world_size(comm(), &size));
    return static_cast<std::size_t>(size);
  }

  template <class Counts>
  View<const std::size_t> counts_view(const Counts& counts) const {
    const View<const std::size_t> each(std::data(counts), std::size(counts));
    detail::require(each.size() == world(), "there must be one count for each rank");
    return each;
  }
};

// The same operations, started: each returns the Work to wait on.
class Async final : public Operations<Async> {
 public:
  explicit Async(unisono_communicator* handle) : handle_(handle) {}

  // Starts to send to rank `to`.
  template <class Buffer>
  Work send(const Buffer& buffer, int to, std::uint64_t tag = 0,
            const Options& options = {}) const {
    constexpr auto dtype = detail::dtype<const Buffer>();
    const auto all = view(buffer);
    unisono_work* work = nullptr;
    check(unisono_isend(handle_, all.data(), all.size(), dtype, to, tag, options.get(), &work));
    return Work(work);
  }

  // Starts to receive from rank `from`, or UNISONO_ANY_SOURCE; Work::source tells from whom.
  template <class Buffer>
  Work recv(Buffer&& buffer, int from, std::uint64_t tag = 0, const Options& options = {}) const {
    constexpr auto dtype = detail::common_dtype<Buffer, Buffer>();
    const auto all = view(buffer);
    unisono_work* work = nullptr;
    check(unisono_irecv(handle_, all.data(), all.size(), dtype, from, tag, options.get(), &work));
    return Work(work);
  }

  unisono_communicator* handle() const noexcept { return handle_; }

 private:
  friend Operations<Async>;
  template <class Call>
  Work run_call(const Call& call) const {
    unisono_work* work = nullptr;
    check(call(&work));
    return Work(work);
  }

  unisono_communicator* handle_;
};

// ---- Communicators ----

using UniqueId = unisono_unique_id;

// Made by one rank and passed to the others, who join by Communicator::from_id.
inline UniqueId make_unique_id(const Config* config = nullptr) {
  UniqueId id;
  check(unisono_unique_id_create(config == nullptr ? nullptr : config->handle(), &id));
  return id;
}

// A key-value store of yours that all ranks reach. What a function throws, joining throws.
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

inline const unisono_config* handle(const Config* config) {
  return config == nullptr ? nullptr : config->handle();
}

}  // namespace detail

// A group of ranks that communicate. It leaves the group when it goes.
class Communicator final : public Operations<Communicator> {
 public:
  // From what the launcher left in the environment.
  static Communicator from_environment(const Config* config = nullptr) {
    unisono_communicator* comm = nullptr;
    check(unisono_communicator_from_environment(detail::handle(config), &comm));
    return Communicator(comm);
  }
  // From tcp://host:port, served by rank 0, or file:///path.
  static Communicator from_url(const std::string& url, int rank, int world_size,
                               const Config* config = nullptr) {
    unisono_communicator* comm = nullptr;
    check(unisono_communicator_from_url(url.c_str(), rank, world_size, detail::handle(config),
                                        &comm));
    return Communicator(comm);
  }
  static Communicator from_id(const UniqueId& id, int rank, int world_size,
                              const Config* config = nullptr) {
    unisono_communicator* comm = nullptr;
    check(unisono_communicator_from_id(&id, rank, world_size, detail::handle(config), &comm));
    return Communicator(comm);
  }
  static Communicator from_store(Store& store, int rank, int world_size,
                                 const Config* config = nullptr) {
    detail::StoreCalls calls{store};
    unisono_store functions = UNISONO_STORE_INIT;
    functions.context = &calls;
    functions.set = detail::StoreCalls::set;
    functions.get = detail::StoreCalls::get;
    functions.wait = detail::StoreCalls::wait;
    unisono_communicator* comm = nullptr;
    const unisono_status status = unisono_communicator_from_store(&functions, rank, world_size,
                                                                  detail::handle(config), &comm);
    if (status != UNISONO_OK && calls.thrown) std::rethrow_exception(calls.thrown);
    check(status);
    return Communicator(comm);
  }

  explicit Communicator(unisono_communicator* handle) : handle_(handle) {}
  ~Communicator() { unisono_communicator_destroy(handle_); }
  Communicator(Communicator&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Communicator& operator=(Communicator&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }

  int rank() const {
    std::int32_t rank = -1;
    check(unisono_communicator_rank(handle_, &rank));
    return rank;
  }
  int size() const {
    std::int32_t size = -1;
    check(unisono_communicator_world_size(handle_, &size));
    return size;
  }

  // The ranks that give the same color, numbered by key; none for no color. Every rank calls it.
  std::optional<Communicator> split(std::optional<std::int64_t> color, std::int64_t key = 0) const {
    unisono_communicator* part = nullptr;
    check(unisono_communicator_split(handle_, color.value_or(UNISONO_NO_COLOR), key, &part));
    if (part == nullptr) return std::nullopt;
    return Communicator(part);
  }

  // How long an operation may take, unless its options say otherwise.
  void set_timeout(Seconds limit) {
    check(unisono_communicator_set_timeout(handle_, limit.count()));
  }

  // Throws the first cause of the communicator's end, if it has come.
  void check_alive() const { check(unisono_communicator_status(handle_)); }

  // Ends every operation on every rank.
  void abort(const std::string& reason) {
    check(unisono_communicator_abort(handle_, reason.c_str()));
  }

  // What this rank was last in, a line for each operation.
  std::string report() const {
    std::size_t length = 0;
    check(unisono_communicator_report(handle_, nullptr, 0, &length));
    // Another thread may add to it in between: then what is there is cut off.
    std::string text(length + 1, '\0');
    check(unisono_communicator_report(handle_, text.data(), text.size(), &length));
    text.resize(std::strlen(text.c_str()));
    return text;
  }

  // The operations that return a Work instead of waiting.
  Async async() const { return Async(handle_); }

  // Sends to rank `to`; returns when the buffer may be used again.
  template <class Buffer>
  void send(const Buffer& buffer, int to, std::uint64_t tag = 0,
            const Options& options = {}) const {
    constexpr auto dtype = detail::dtype<const Buffer>();
    const auto all = view(buffer);
    check(unisono_send(handle_, all.data(), all.size(), dtype, to, tag, options.get()));
  }

  // Receives from rank `from`, or UNISONO_ANY_SOURCE. Returns the rank it came from. Within a Group
  // `from` must be a rank, since it is not known yet who sends; else use async().recv.
  template <class Buffer>
  int recv(Buffer&& buffer, int from, std::uint64_t tag = 0, const Options& options = {}) const {
    constexpr auto dtype = detail::common_dtype<Buffer, Buffer>();
    const auto all = view(buffer);
    std::int32_t source = from;
    const bool is_known = from != UNISONO_ANY_SOURCE;
    check(unisono_recv(handle_, all.data(), all.size(), dtype, from, tag, options.get(),
                       is_known ? nullptr : &source));
    return source;
  }

  // Sends to rank `to` and receives from rank `from` at the same time; as `send` and `recv`.
  template <class Outgoing, class Incoming>
  int sendrecv(const Outgoing& outgoing, int to, Incoming&& incoming, int from,
               std::uint64_t tag = 0, const Options& options = {}) const {
    constexpr auto dtype = detail::common_dtype<const Outgoing, Incoming>();
    const auto sent = view(outgoing);
    const auto received = view(incoming);
    std::int32_t source = from;
    const bool is_known = from != UNISONO_ANY_SOURCE;
    check(unisono_sendrecv(handle_, sent.data(), sent.size(), to, received.data(), received.size(),
                           from, dtype, tag, options.get(), is_known ? nullptr : &source));
    return source;
  }

  unisono_communicator* handle() const noexcept { return handle_; }

 private:
  friend Operations<Communicator>;
  template <class Call>
  void run_call(const Call& call) const {
    check(call(nullptr));
  }

  unisono_communicator* handle_ = nullptr;
};

}  // namespace unisono

#endif
