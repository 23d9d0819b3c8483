#include "work.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include <thread>

#include "convert.hpp"

namespace unisono {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<uint64_t> next_key = 1;

// Completions that have been made and not yet destroyed.
std::atomic<size_t> outstanding = 0;

}  // namespace

CountedCompletion::CountedCompletion() {
  outstanding.fetch_add(1, std::memory_order_relaxed);
}

CountedCompletion::~CountedCompletion() {
  outstanding.fetch_sub(1, std::memory_order_release);
}

uint64_t new_key() {
  return next_key.fetch_add(1, std::memory_order_relaxed);
}

std::chrono::milliseconds extended(std::chrono::milliseconds limit,
                                   std::chrono::milliseconds extra) {
  return limit.count() > 0 ? limit + extra : limit;
}

const char* title_if_profiled(const char* title) {
  return at::hasCallbacks() ? title : nullptr;
}

std::optional<Tensors> inputs_if_profiled(const Tensors& inputs) {
  if (!at::hasCallbacks() || inputs.empty()) return std::nullopt;
  return inputs;
}

c10::IValue work_result(const Handle& handle, bool failed) {
  auto result = c10d::WorkResult::SUCCESS;
  if (failed) {
    const bool late = handle.group->error().code == static_cast<uint8_t>(Code::Timeout);
    result = late ? c10d::WorkResult::TIMEOUT : c10d::WorkResult::COMM_ERROR;
  }
  return c10::IValue(static_cast<int64_t>(result));
}

Work::Work(int rank, c10d::OpType type, const char* title, const Tensors& inputs, Tensors results,
           std::chrono::milliseconds timeout, const std::shared_ptr<Handle>& handle)
    : c10d::Work(rank, type, title_if_profiled(title), inputs_if_profiled(inputs)),
      key_(new_key()),
      started_(Clock::now()),
      handle_(handle),
      timeout_(extended(timeout, handle->observers.begin(key_))),
      results_(std::move(results)) {}

Work::~Work() {
  if (!isCompleted()) {
    // Nothing was started, so the observers must hear nothing.
    handle_->observers.forget(key_);
  }
}

void Work::expect(size_t operations) {
  pending_ = operations;
  operations_.reserve(operations);
}

void Work::keep(Kept&& kept) {
  kept_.push_back(std::move(kept));
}

void Work::attach(rust::Box<Operation> operation) {
  operations_.push_back(std::move(operation));
}

void Work::part(std::exception_ptr error) {
  {
    std::lock_guard lock(settling_);
    if (error && !first_error_) first_error_ = std::move(error);
    if (--pending_ > 0) return;
    error = first_error_;
  }
  settle(std::move(error));
}

void Work::settle(std::exception_ptr error) {
  const auto futures = end(std::move(error));
  if (!futures) return;
  const bool failed = exception() != nullptr;
  handle_->observers.end([&] {
    return Ending{.key = key_,
                  .type = retrieveOpType(),
                  .sequence = getSequencenumber(),
                  .started = started_,
                  .milliseconds = getDuration(),
                  .failed = failed,
                  .dead = failed && handle_->group->error().code != 0};
  });
  // Callbacks may do anything.
  if (futures->value) complete(*futures->value);
  if (futures->result) report(*futures->result);
}

std::optional<Work::Futures> Work::end(std::exception_ptr error) {
  // Outlives the lock: tensors may take the interpreter's lock when they go.
  std::vector<Kept> kept;
  std::lock_guard lock(settling_);
  if (settled_.load(std::memory_order_relaxed)) return std::nullopt;
  if (!error) {
    try {
      // This may be a thread in which autograd is on; an operation in place on a leaf would be
      // refused.
      at::AutoDispatchBelowADInplaceOrView guard;
      for (const Kept& part : kept_) {
        for (const auto& [to, from] : part.copies) to.copy_(from);
      }
    } catch (...) {
      error = std::current_exception();
    }
  }
  kept.swap(kept_);
  const std::chrono::duration<float, std::milli> took = Clock::now() - started_;
  milliseconds_ = took.count();
  finish(error);
  settled_.store(true, std::memory_order_release);
  return futures_;
}

void Work::complete(c10::ivalue::Future& future) {
  if (auto error = exception()) {
    future.setError(error);
  } else {
    future.markCompleted(c10::IValue(results_));
  }
}

void Work::report(c10::ivalue::Future& future) {
  future.markCompleted(work_result(*handle_, exception() != nullptr));
}

bool Work::isCompleted() {
  return settled_.load(std::memory_order_acquire);
}

bool Work::isSuccess() const {
  return exception() == nullptr;
}

std::exception_ptr Work::exception() const {
  std::lock_guard lock(mutex_);
  return exception_;
}

int Work::sourceRank() const {
  TORCH_CHECK(!operations_.empty(), "unisono: only the work of a receive has a source rank");
  return static_cast<int>(operations_.front()->source());
}

Tensors Work::result() {
  TORCH_CHECK(isCompleted(), "unisono: result() before the work is complete; call wait() first");
  return results_;
}

bool Work::wait(std::chrono::milliseconds timeout) {
  if (!isCompleted()) {
    const auto deadline = Clock::now() + timeout;
    std::exception_ptr error;
    for (const auto& operation : operations_) {
      int64_t limit = -1;
      if (timeout != kNoTimeout) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
        limit = std::max<int64_t>(left.count(), 0);
      }
      Status status = operation->wait(limit);
      if (status.code == 0) continue;
      if (static_cast<Code>(status.code) == Code::Interrupted) {
        // The group is dead, and the operations end. The abort also ends those on devices.
        handle_->abort("interrupted");
        raise(status);
      }
      // The caller's patience ran out; the operation goes on.
      if (!operation->is_done()) raise(status);
      // It may have ended since, and not with that.
      status = operation->wait(0);
      if (status.code == 0) continue;
      if (!error) error = unisono::exception(status);
    }
    {
      std::lock_guard lock(settling_);
      if (first_error_) error = first_error_;
    }
    settle(std::move(error));
  }
  if (auto error = exception()) raise(error);
  return true;
}

void Work::abort() {
  handle_->abort("Work.abort() was called");
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard lock(settling_);
    if (futures_.value) return futures_.value;
    const auto tensors = c10::ListType::create(c10::TensorType::get());
    future = futures_.value = c10::make_intrusive<c10::ivalue::Future>(tensors);
    // Before the end, the thread that settles will complete it; after the end, this call does.
    if (!settled_.load(std::memory_order_relaxed)) return future;
  }
  complete(*future);
  return future;
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFutureResult() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard lock(settling_);
    if (futures_.result) return futures_.result;
    future = futures_.result = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
    if (!settled_.load(std::memory_order_relaxed)) return future;
  }
  report(*future);
  return future;
}

float Work::getDuration() const {
  TORCH_CHECK(settled_.load(std::memory_order_acquire),
              "unisono: getDuration() before the work is complete");
  double longest = -1;
  for (const auto& operation : operations_) {
    longest = std::max(longest, operation->milliseconds());
  }
  return longest < 0 ? milliseconds_ : static_cast<float>(longest);
}

uint64_t Work::getSequencenumber() const {
  return operations_.empty() ? sequence_ : operations_.front()->sequence();
}

void drain_completions(std::chrono::milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  while (outstanding.load(std::memory_order_acquire) > 0 && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace unisono
