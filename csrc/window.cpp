#include "window.hpp"

#ifdef C10D_BACKEND_HAS_WINDOW

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "backend.hpp"
#include "convert.hpp"
#include "streams.hpp"

namespace unisono {

namespace {

// A tensor that owns memory which the core uses.
class KeptTensor final : public Keeper {
 public:
  explicit KeptTensor(at::Tensor tensor) : tensor_(std::move(tensor)) {}

 private:
  const at::Tensor tensor_;
};

std::unique_ptr<Keeper> keep(const at::Tensor& tensor) {
  return std::make_unique<KeptTensor>(tensor);
}

Piece piece_of(const at::Tensor& tensor) {
  return {.address = reinterpret_cast<uintptr_t>(tensor.data_ptr()),
          .bytes = static_cast<size_t>(tensor.nbytes())};
}

void check_plain(const at::Tensor& tensor) {
  check_tensor(tensor, "tensor");
  if (!tensor.is_contiguous()) {
    wrong_value("tensor", "it is not contiguous; pass tensor.contiguous()");
  }
  if (tensor.is_conj() || tensor.is_neg()) {
    wrong_value("tensor", "its memory has other values; pass tensor.resolve_conj().resolve_neg()");
  }
}

// The core copies in a stream of its own: what is in the current one has ended before.
void await_stream(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return;
  if (!is_there(tensor.device())) {
    wrong_value("tensor", c10::str("it is on ", tensor.device(), ", which is not there"));
  }
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  const c10::Stream stream = guard.getStream(tensor.device());
  if (is_capturing(stream)) {
    wrong_value("tensor", "its stream is being captured, and a graph has no windows");
  }
  guard.synchronizeStream(stream);
}

// The note of a rank: the number of its tensor's type, and its sizes.
std::vector<int64_t> note_of(const at::Tensor& tensor) {
  std::vector<int64_t> note{static_cast<int64_t>(tensor.scalar_type())};
  note.insert(note.end(), tensor.sizes().begin(), tensor.sizes().end());
  return note;
}

struct Kind {
  at::ScalarType type;
  std::vector<int64_t> sizes;
};

Kind kind_of(const Window& window, int64_t rank) {
  const rust::Vec<uint8_t> note = window.note(rank);
  std::vector<int64_t> numbers(note.size() / sizeof(int64_t));
  std::memcpy(numbers.data(), note.data(), numbers.size() * sizeof(int64_t));
  const bool is_known = !numbers.empty() && numbers[0] >= 0 &&
                        numbers[0] < static_cast<int64_t>(at::ScalarType::NumOptions);
  Kind kind{is_known ? static_cast<at::ScalarType>(numbers[0]) : at::ScalarType::Undefined, {}};
  if (is_known) kind.sizes.assign(numbers.begin() + 1, numbers.end());
  size_t bytes = is_known ? c10::elementSize(kind.type) : 0;
  bool is_sound = is_known;
  for (const int64_t size : kind.sizes) {
    is_sound = is_sound && size >= 0 && !__builtin_mul_overflow(bytes, size, &bytes);
  }
  if (!is_sound || bytes != window.bytes(rank)) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("unisono: rank ", rank, " exposes memory that is no tensor"));
  }
  return kind;
}

// By the clock that a mutex takes with the oldest glibc of a wheel.
std::chrono::system_clock::time_point until(int64_t timeout_ms) {
  constexpr int64_t kLongest = 1'000'000'000;
  return std::chrono::system_clock::now() +
         std::chrono::milliseconds(std::min(timeout_ms, kLongest));
}

std::optional<Status> ended(Status status) {
  return std::optional<Status>(std::move(status));
}

}  // namespace

TensorWindow::TensorWindow(std::shared_ptr<Handle> handle, int rank, int size)
    : handle_(std::move(handle)), rank_(rank), size_(size) {}

TensorWindow::~TensorWindow() {
  if (exposure_) exposure_->window->close();
}

std::shared_ptr<Exposure> TensorWindow::exposure() const {
  std::lock_guard lock(mutex_);
  if (!exposure_) {
    C10_THROW_ERROR(ValueError,
                    "unisono: the window has no tensor: all ranks call tensor_register first");
  }
  return exposure_;
}

void TensorWindow::check_rank(int64_t rank, const char* argument) const {
  if (rank < 0 || rank >= size_) {
    wrong_value(argument,
                c10::str("rank ", rank, " is out of range: the group has ", size_, " ranks"));
  }
}

// The tensor is kept also where it need not be: others write to its memory.
void TensorWindow::tensor_register(const at::Tensor& tensor, bool /*owning*/) {
  check_plain(tensor);
  await_stream(tensor);
  {
    std::lock_guard lock(mutex_);
    if (exposure_) {
      C10_THROW_ERROR(ValueError, "unisono: the window has a tensor: deregister that first");
    }
  }
  const std::vector<int64_t> note = note_of(tensor);
  Exposed made = expose(
      *handle_->group, piece_of(tensor),
      {reinterpret_cast<const uint8_t*>(note.data()), note.size() * sizeof(int64_t)}, keep(tensor));
  raise(made.status);
  std::lock_guard lock(mutex_);
  exposure_ = std::make_shared<Exposure>(std::move(made.window), tensor);
}

void TensorWindow::tensor_deregister() {
  const auto exposed = exposure();
  // After a failure there is nothing to wait for.
  const Status status = exposed->window->fence();
  exposed->window->close();
  {
    std::lock_guard lock(mutex_);
    exposure_ = nullptr;
  }
  raise(status);
}

c10::intrusive_ptr<c10d::Work> TensorWindow::put(const at::Tensor& tensor, int64_t dst_rank,
                                                 int64_t target_offset_nelems, bool async_op,
                                                 const c10d::PutOptions& opts) {
  const auto exposed = exposure();
  check_rank(dst_rank, "dst_rank");
  check_plain(tensor);
  if (tensor.is_cuda() && !exposed->window->has_devices()) {
    wrong_value("tensor", c10::str("it is on ", tensor.device(),
                                   ", but no rank of the window exposes a tensor on a device; "
                                   "pass tensor.cpu()"));
  }
  await_stream(tensor);
  const Kind kind = kind_of(*exposed->window, dst_rank);
  if (kind.type != tensor.scalar_type()) {
    wrong_value("tensor", c10::str("it is of ", tensor.scalar_type(), ", but the window of rank ",
                                   dst_rank, " is of ", kind.type));
  }
  size_t offset = 0;
  if (target_offset_nelems < 0 ||
      __builtin_mul_overflow(tensor.element_size(), target_offset_nelems, &offset)) {
    wrong_value("target_offset_nelems", c10::str(target_offset_nelems, " is no place in a tensor"));
  }
  Begun begun = unisono::put(*exposed->window, dst_rank, offset, piece_of(tensor), keep(tensor));
  raise(begun.status);
  if (begun.transfer->is_done()) {
    raise(begun.transfer->wait(0));
    return c10::make_intrusive<WindowWork>(rank_);
  }
  auto transfer = std::make_shared<rust::Box<Transfer>>(std::move(begun.transfer));
  const int64_t limit = milliseconds(opts.timeout);
  auto attempt = [exposed, transfer, limit](int64_t timeout_ms) -> std::optional<Status> {
    if (timeout_ms == 0 && !(*transfer)->is_done()) return std::nullopt;
    Status status = (*transfer)->wait(timeout_ms < 0 ? limit : timeout_ms);
    if (timeout_ms >= 0 && !(*transfer)->is_done()) return std::nullopt;
    return ended(std::move(status));
  };
  auto work = c10::make_intrusive<WindowWork>(rank_, std::move(attempt));
  if (!async_op) work->wait();
  return work;
}

at::Tensor TensorWindow::map_remote_tensor(int64_t rank) {
  const auto exposed = exposure();
  check_rank(rank, "rank");
  if (rank == rank_) return exposed->tensor;
  const Kind kind = kind_of(*exposed->window, rank);
  Viewed viewed = view(*exposed->window, rank);
  raise(viewed.status);
  auto kept = std::make_shared<rust::Box<View>>(std::move(viewed.view));
  const at::Device device =
      viewed.device < 0 ? at::Device(at::kCPU)
                        : at::Device(at::kCUDA, static_cast<at::DeviceIndex>(viewed.device));
  return at::for_blob(reinterpret_cast<void*>(viewed.address), kind.sizes)
      .deleter([kept](void*) mutable { kept.reset(); })
      .options(at::TensorOptions(kind.type).device(device))
      .target_device(device)
      .make_tensor();
}

c10::intrusive_ptr<c10d::Work> TensorWindow::signal(int64_t peer_rank, bool /*async_op*/,
                                                    const c10d::SignalOptions& /*opts*/) {
  const auto exposed = exposure();
  check_rank(peer_rank, "peer_rank");
  // The peer may write to it from now on.
  await_stream(exposed->tensor);
  raise(exposed->window->signal(peer_rank));
  return c10::make_intrusive<WindowWork>(rank_);
}

c10::intrusive_ptr<c10d::Work> TensorWindow::wait_signal(int64_t peer_rank, bool async_op,
                                                         const c10d::WaitSignalOptions& opts) {
  const auto exposed = exposure();
  check_rank(peer_rank, "peer_rank");
  const int64_t limit = milliseconds(opts.timeout);
  if (!async_op) {
    raise(exposed->window->wait_signal(peer_rank, limit));
    return c10::make_intrusive<WindowWork>(rank_);
  }
  auto attempt = [exposed, peer_rank, limit](int64_t timeout_ms) -> std::optional<Status> {
    if (timeout_ms < 0) return ended(exposed->window->wait_signal(peer_rank, limit));
    if (timeout_ms == 0) {
      Tried tried = exposed->window->try_wait_signal(peer_rank);
      if (tried.status.code == 0 && !tried.has_come) return std::nullopt;
      return ended(std::move(tried.status));
    }
    Status status = exposed->window->wait_signal(peer_rank, timeout_ms);
    // The wait is over, and the signal may still come.
    if (static_cast<Code>(status.code) == Code::Timeout) return std::nullopt;
    return ended(std::move(status));
  };
  return c10::make_intrusive<WindowWork>(rank_, std::move(attempt));
}

// Memory of the host, and of a device, has one copy, which all see.
c10d::WindowAttr TensorWindow::get_attr(int64_t peer_rank) {
  check_rank(peer_rank, "peer_rank");
  return {.access_type = c10d::WindowAccessType::UNIFIED};
}

c10::intrusive_ptr<c10d::Window> Backend::new_window(const std::optional<at::Tensor>& tensor) {
  auto window = c10::make_intrusive<TensorWindow>(handle_, getRank(), getSize());
  if (tensor) window->tensor_register(*tensor, true);
  return window;
}

WindowWork::WindowWork(int rank, Attempt attempt)
    : c10d::Work(rank, c10d::OpType::UNKNOWN), attempt_(std::move(attempt)) {}

WindowWork::WindowWork(int rank) : c10d::Work(rank, c10d::OpType::UNKNOWN), has_ended_(true) {}

bool WindowWork::attempt(int64_t timeout_ms) {
  std::unique_lock turn(turn_, std::defer_lock);
  if (timeout_ms < 0) {
    turn.lock();
  } else if (!turn.try_lock_until(until(timeout_ms))) {
    // Another thread waits for it.
    return false;
  }
  // Who has the turn ends it alone.
  if (!attempt_) return true;
  const auto status = attempt_(timeout_ms);
  if (!status) return false;
  attempt_ = nullptr;
  std::lock_guard lock(mutex_);
  if (status->code != 0) error_ = unisono::exception(*status);
  has_ended_ = true;
  return true;
}

bool WindowWork::isCompleted() {
  return attempt(0);
}

bool WindowWork::isSuccess() const {
  std::lock_guard lock(mutex_);
  return has_ended_ && !error_;
}

std::exception_ptr WindowWork::exception() const {
  std::lock_guard lock(mutex_);
  return error_;
}

bool WindowWork::wait(std::chrono::milliseconds timeout) {
  if (!attempt(timeout == kNoTimeout ? -1 : timeout.count())) {
    C10_THROW_ERROR(DistBackendError, c10::str("unisono: Timed out waiting: not complete after ",
                                               timeout.count(), " ms, and goes on"));
  }
  if (const auto error = exception()) raise(error);
  return true;
}

// It has no thread of its own: who asks for a future waits.
c10::intrusive_ptr<c10::ivalue::Future> WindowWork::getFuture() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
  attempt(-1);
  if (const auto error = exception()) {
    future->setError(error);
  } else {
    future->markCompleted();
  }
  return future;
}

}  // namespace unisono

#endif
