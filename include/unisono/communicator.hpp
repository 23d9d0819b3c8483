// A group of ranks. Part of unisono.hpp.
#ifndef UNISONO_COMMUNICATOR_HPP
#define UNISONO_COMMUNICATOR_HPP

#include <unisono.h>
#include <unisono/buffers.hpp>
#include <unisono/errors.hpp>
#include <unisono/operations.hpp>
#include <unisono/options.hpp>
#include <unisono/store.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace unisono {

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

  // The ranks that are left, in their order; all of them call it, usually after a rank has gone.
  // The excluded ones are left out although they live.
  Communicator shrink(const std::vector<int>& excluded = {},
                      Seconds patience = Seconds(300)) const {
    const std::vector<std::int32_t> ranks(excluded.begin(), excluded.end());
    unisono_communicator* shrunk = nullptr;
    check(unisono_communicator_shrink(handle_, ranks.data(), ranks.size(), patience.count(),
                                      &shrunk));
    return Communicator(shrunk);
  }

  // The same, where the ranks that are left keep their numbers: `living` tells which they are.
  // Nothing reads or writes the blocks of the others.
  Communicator mask(const std::vector<int>& excluded = {}, Seconds patience = Seconds(300)) const {
    const std::vector<std::int32_t> ranks(excluded.begin(), excluded.end());
    unisono_communicator* masked = nullptr;
    check(
        unisono_communicator_mask(handle_, ranks.data(), ranks.size(), patience.count(), &masked));
    return Communicator(masked);
  }

  // The ranks that take part.
  std::vector<int> living() const {
    std::vector<std::int32_t> ranks(size());
    std::size_t count = 0;
    check(unisono_communicator_living(handle_, ranks.data(), &count));
    return {ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(count)};
  }

  // These ranks and processes that come, `world_size` in all, or as many as met before; all ranks
  // call it. Those that come meet them as at the start of the job. An empty url: where these met.
  Communicator grow(int world_size = 0, const std::string& url = {},
                    Seconds patience = Seconds(300)) const {
    unisono_communicator* grown = nullptr;
    check(unisono_communicator_grow(handle_, url.empty() ? nullptr : url.c_str(), world_size,
                                    patience.count(), &grown));
    return Communicator(grown);
  }

  // The ranks that came when it formed: all of them, or those that grow has taken in.
  std::vector<int> newcomers() const {
    std::vector<std::int32_t> ranks(size());
    std::size_t count = 0;
    check(unisono_communicator_newcomers(handle_, ranks.data(), &count));
    return {ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(count)};
  }

  // Of a communicator that shrink has made: the number that each of its ranks had before, and how
  // many collectives had ended there on all of them.
  std::pair<std::vector<int>, std::uint64_t> former() const {
    std::vector<std::int32_t> ranks(size());
    std::uint64_t ended = 0;
    check(unisono_communicator_former(handle_, ranks.data(), &ended));
    return {{ranks.begin(), ranks.end()}, ended};
  }

  // How many collectives have ended on this rank, one after the other.
  std::uint64_t ended() const {
    std::uint64_t ended = 0;
    check(unisono_communicator_ended(handle_, &ended));
    return ended;
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

  // The latest operations of this rank, a line for each.
  std::string report() const { return text_of(unisono_communicator_report); }

  // For whom the operations of this rank have waited, as JSON.
  std::string stats() const { return text_of(unisono_communicator_stats); }

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

  // Receives from rank `from`, or UNISONO_ANY_SOURCE, at most what the buffer has room for
  // (Options::received tells how much came). Returns the rank it came from. Within a Group
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

  // A message that a receive would get.
  struct Message {
    int source;
    std::size_t count;
    unisono_dtype dtype;
  };

  // Waits, at most so long, for a message from rank `from`, or UNISONO_ANY_SOURCE, and leaves it to
  // the next receive that asks for it. Without a time, an error TIMEOUT says that none has come.
  Message probe(int from, std::uint64_t tag = 0, Seconds limit = Seconds(UNISONO_FOREVER)) const {
    std::int32_t source = -1;
    Message found = {};
    check(unisono_probe(handle_, from, tag, limit.count(), &source, &found.count, &found.dtype));
    found.source = source;
    return found;
  }

  unisono_communicator* handle() const noexcept { return handle_; }

 private:
  friend Operations<Communicator>;
  template <class Call>
  void run_call(const Call& call) const {
    check(call(nullptr));
  }

  template <class Tell>
  std::string text_of(const Tell& tell) const {
    std::string text;
    std::size_t length = 0;
    // It may grow between two calls.
    do {
      text.resize(length + 256);
      check(tell(handle_, text.data(), text.size(), &length));
    } while (length >= text.size());
    text.resize(std::strlen(text.c_str()));
    return text;
  }

  unisono_communicator* handle_ = nullptr;
};

// A process that may become a member of groups, again and again. The program passes handles around.
class Candidate {
 public:
  explicit Candidate(const Config* config = nullptr) {
    check(unisono_candidate_create(detail::handle(config), &handle_));
  }
  ~Candidate() { unisono_candidate_destroy(handle_); }
  Candidate(Candidate&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Candidate& operator=(Candidate&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }

  // The text by which others get to know this process.
  std::string text() const {
    const char* text = nullptr;
    check(unisono_candidate_handle(handle_, &text));
    return text;
  }
  // The group of the processes with these handles, the same in all of them, as is the number.
  Communicator form(const std::vector<std::string>& handles, std::int64_t number,
                    Seconds patience = Seconds(300)) const {
    std::vector<const char*> texts;
    for (const std::string& handle : handles) texts.push_back(handle.c_str());
    unisono_communicator* comm = nullptr;
    check(unisono_candidate_form(handle_, texts.data(), texts.size(), number, patience.count(),
                                 &comm));
    return Communicator(comm);
  }

 private:
  unisono_candidate* handle_ = nullptr;
};

}  // namespace unisono

#endif
