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

class WorkCompletion final : public Completion {
 public:
  explicit WorkCompletion(c10::intrusive_ptr<Work> work) : work_(std::move(work)) {
    outstanding.fetch_add(1, std::memory_order_relaxed);
  }

  ~WorkCompletion() override {
    work_.reset();
    outstanding.fetch_sub(1, std::memory_order_release);
  }

  void finish(const Status& status) noexcept override {
    try {
      work_->part(status.code == 0 ? nullptr : unisono::exception(status));
    } catch (const std::exception& error) {
      TORCH_WARN("unisono: a completion failed: ", error.what());
    }
  }

 private:
  c10::intrusive_ptr<Work> work_;
};

// A profiler's record costs an allocation; only pay when somebody listens.
const char* title_if_profiled(const char* title) {
  return at::hasCallbacks() ? title : nullptr;
}

std::optional<Tensors> inputs_if_profiled(const Tensors& inputs) {
  if (!at::hasCallbacks() || inputs.empty()) return std::nullopt;
  return inputs;
}

}  // namespace

Work::Work(int rank, c10d::OpType type, const char* title, const Tensors& inputs, Tensors results,
           std::chrono::milliseconds timeout, const std::shared_ptr<Handle>& handle)
    : c10d::Work(rank, type, title_if_profiled(title), inputs_if_profiled(inputs)),
      key_(next_key.fetch_add(1, std::memory_order_relaxed)),
      timeout_(timeout),
      handle_(handle),
      results_(std::move(results)) {}

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
  std::vector<Kept> kept;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard lock(settling_);
    if (settled_.load(std::memory_order_relaxed)) return;
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
    finish(error);
    future = future_;
    settled_.store(true, std::memory_order_release);
  }
  // Outside the lock: tensors may take the interpreter's lock when they go, and callbacks may do
  // anything.
  kept.clear();
  if (future) complete(*future);
}

void Work::complete(c10::ivalue::Future& future) {
  if (auto error = exception()) {
    future.setError(error);
  } else {
    future.markCompleted(c10::IValue(results_));
  }
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
      const Status status = operation->wait(limit);
      if (status.code == 0) continue;
      // The caller's patience ran out; the operation goes on.
      if (!operation->is_done()) raise(status);
      if (!error) error = unisono::exception(status);
    }
    {
      std::lock_guard lock(settling_);
      if (first_error_) error = first_error_;
    }
    settle(std::move(error));
  }
  if (auto error = exception()) std::rethrow_exception(error);
  return true;
}

void Work::abort() {
  if (auto handle = handle_.lock()) handle->group->abort("Work.abort() was called");
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard lock(settling_);
    if (future_) return future_;
    const auto tensors = c10::ListType::create(c10::TensorType::get());
    future = future_ = c10::make_intrusive<c10::ivalue::Future>(tensors);
    // Before the end, whoever settles completes it; after the end, whoever made it.
    if (!settled_.load(std::memory_order_relaxed)) return future;
  }
  complete(*future);
  return future;
}

float Work::getDuration() const {
  TORCH_CHECK(!operations_.empty(), "unisono: no duration was measured for this work");
  double longest = 0;
  for (const auto& operation : operations_) {
    const double took = operation->milliseconds();
    TORCH_CHECK(took >= 0, "unisono: getDuration() before the work is complete");
    longest = std::max(longest, took);
  }
  return static_cast<float>(longest);
}

uint64_t Work::getSequencenumber() const {
  return operations_.empty() ? 0 : operations_.front()->sequence();
}

std::unique_ptr<Completion> completion(c10::intrusive_ptr<Work> work) {
  return std::make_unique<WorkCompletion>(std::move(work));
}

void drain_completions(std::chrono::milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  while (outstanding.load(std::memory_order_acquire) > 0 && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace unisono
