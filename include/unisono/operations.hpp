// The collectives, and all operations started instead of waited for. Part of unisono.hpp.
#ifndef UNISONO_OPERATIONS_HPP
#define UNISONO_OPERATIONS_HPP

#include <unisono.h>
#include <unisono/buffers.hpp>
#include <unisono/errors.hpp>
#include <unisono/options.hpp>
#include <unisono/work.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace unisono {

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

  // Every rank's buffer becomes the reduction of those up to its own, in rank order.
  template <class Buffer>
  auto scan(Buffer&& buffer, unisono_op op, const Options& options = {}) const {
    return scan(buffer, buffer, op, options);
  }
  template <class Input, class Output, class = detail::element<Output>>
  auto scan(const Input& input, Output&& output, unisono_op op, const Options& options = {}) const {
    constexpr auto dtype = detail::common_dtype<const Input, Output>();
    const auto in = view(input);
    const auto out = view(output);
    detail::require(in.size() == out.size(), "scan: input and output differ in size");
    return run([&](unisono_work** work) {
      return unisono_scan(comm(), in.data(), out.data(), out.size(), dtype, op, options.get(),
                          work);
    });
  }

  // Every rank's buffer becomes the reduction of those before its own; rank 0's stays as it is.
  template <class Buffer>
  auto exscan(Buffer&& buffer, unisono_op op, const Options& options = {}) const {
    return exscan(buffer, buffer, op, options);
  }
  // The output of rank 0 stays as it is and may be empty.
  template <class Input, class Output, class = detail::element<Output>>
  auto exscan(const Input& input, Output&& output, unisono_op op,
              const Options& options = {}) const {
    constexpr auto dtype = detail::common_dtype<const Input, Output>();
    const auto in = view(input);
    const auto out = view(output);
    detail::require(rank() == 0 || in.size() == out.size(),
                    "exscan: input and output differ in size");
    return run([&](unisono_work** work) {
      return unisono_exscan(comm(), in.data(), out.data(), in.size(), dtype, op, options.get(),
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

}  // namespace unisono

#endif
