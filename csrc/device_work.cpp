#include "device_work.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Logging.h>
#include <cstdlib>
#include <string>
#include <system_error>
#include <thread>

#include "convert.hpp"

namespace unisono {
namespace {

using Clock = std::chrono::steady_clock;
using WeakStorages = std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>;

// How long a program may take to call something that raises the error of a group that failed, once
// that has been reported. And how long before the report it may have been raised already: a call
// may be under way for some seconds more, until its stream has been let pass.
constexpr std::chrono::seconds kPatience(5);
constexpr std::chrono::seconds kBefore(30);

// Ends the process after that, unless an error of unisono's has been raised: what streams go on
// with is no result, and a program that has not heard of it would use it. ProcessGroupNCCL does the
// same by default, and at once.
void end_unless_raised(std::string cause) {
  const auto failed = Clock::now();
  std::thread([cause = std::move(cause), failed] {
    std::this_thread::sleep_until(failed + kPatience);
    const Clock::time_point raised{Clock::duration(last_raised.load())};
    if (raised > failed - kBefore) return;
    LOG(ERROR) << cause << "; in " << kPatience.count()
               << " s no call has raised this, so the process ends before it uses what its streams "
                  "hold (UNISONO_DEVICE_FAILURE=raise lets it go on)";
    std::abort();
  }).detach();
}

WeakStorages storages_of(const Tensors& tensors) {
  WeakStorages storages;
  for (const at::Tensor& tensor : tensors)
    storages.push_back(tensor.storage().getWeakStorageImpl());
  return storages;
}

}  // namespace

void Handle::report(const std::exception_ptr& error) {
  // A group that this process ended itself needs no report, nor does a refusal.
  if (left_ || group->error().code == 0 || reported_.exchange(true)) return;
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& failure) {
    const std::string cause = failure.what_without_backtrace();
    LOG(ERROR) << cause
               << " (streams go on, with NaN or zeros for results; the next call of this group, or "
                  "wait(), raises this error)";
    try {
      if (ends_) end_unless_raised(cause);
    } catch (const std::system_error&) {
      // No thread can be had: it stays with the log.
    }
  } catch (...) {
  }
}

Passage::Passage(c10d::OpType type, std::chrono::milliseconds timeout,
                 const std::shared_ptr<Handle>& handle, bool captured)
    : key_(new_key()),
      type_(type),
      started_(Clock::now()),
      handle_(handle),
      timeout_(extended(timeout, handle->observers.begin(key_))),
      captured_(captured),
      awaited_(!captured && !c10d::isP2POp(type)) {
  if (awaited_) handle_->begin_on_device();
}

Passage::~Passage() {
  if (ended()) return;
  // Nothing was started, so the observers must hear nothing.
  handle_->observers.forget(key_);
  if (awaited_) handle_->end_on_device();
}

void Passage::keep(Kept&& kept) {
  std::lock_guard lock(mutex_);
  kept_.push_back(std::move(kept));
}

bool Passage::copy_back(const c10::Stream& stream) const {
  const c10::impl::VirtualGuardImpl allocator(stream.device_type());
  // An operation in place on a leaf would be refused where autograd is on.
  at::AutoDispatchBelowADInplaceOrView guard;
  bool copied = false;
  for (const Kept& part : kept_) {
    for (const auto& [to, from] : part.copies) {
      to.copy_(from, /*non_blocking=*/true);
      // The copies come after the operations, whose end is all that their completions tell of.
      allocator.recordDataPtrOnStream(to.storage().data_ptr(), stream);
      allocator.recordDataPtrOnStream(from.storage().data_ptr(), stream);
      copied = true;
    }
  }
  return copied;
}

void Passage::release() {
  // Outlives the lock: tensors may take the interpreter's lock when they go.
  std::vector<Kept> kept;
  std::lock_guard lock(mutex_);
  kept.swap(kept_);
}

void Passage::retire() {
  if (!captured_) return;
  std::vector<Kept> kept;
  {
    std::lock_guard lock(mutex_);
    kept.swap(kept_);
  }
  if (!kept.empty()) handle_->retain(std::move(kept));
}

void Passage::part(std::exception_ptr error) {
  std::vector<Kept> kept;
  FuturePointer result;
  {
    std::lock_guard lock(mutex_);
    if (error && !error_) error_ = std::move(error);
    if (--pending_ > 0) return;
    if (!captured_) kept.swap(kept_);
    error = error_;
    result = result_;
    ended_.store(true, std::memory_order_release);
  }
  const bool failed = error != nullptr;
  if (failed) handle_->report(error);
  handle_->observers.end([&] {
    const std::chrono::duration<float, std::milli> took = Clock::now() - started_;
    return Ending{.key = key_,
                  .type = type_,
                  .sequence = sequence_,
                  .started = started_,
                  .milliseconds = took.count(),
                  .failed = failed,
                  .dead = failed && handle_->group->error().code != 0};
  });
  if (result) result->markCompleted(work_result(*handle_, failed));
  if (awaited_) handle_->end_on_device();
}

std::exception_ptr Passage::error() const {
  {
    std::lock_guard lock(mutex_);
    if (error_ || ended()) return error_;
  }
  // The device may never get there.
  const Status status = handle_->group->error();
  return status.code == 0 ? nullptr : unisono::exception(status);
}

Passage::FuturePointer Passage::result() {
  FuturePointer result;
  bool failed = false;
  {
    std::lock_guard lock(mutex_);
    if (result_) return result_;
    result = result_ = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
    // Before the end, part() will complete it; after the end, this call does.
    if (!ended()) return result;
    failed = error_ != nullptr;
  }
  result->markCompleted(work_result(*handle_, failed));
  return result;
}

DeviceWork::DeviceWork(int rank, c10d::OpType type, const char* title, const Tensors& inputs,
                       Tensors results, std::chrono::milliseconds timeout,
                       const std::shared_ptr<Handle>& handle, const c10::Stream& stream,
                       const c10::Stream& caller, bool captured, bool timed)
    : c10d::Work(rank, type, title_if_profiled(title), inputs_if_profiled(inputs)),
      stream_(stream),
      caller_(caller),
      captured_(captured),
      passage_(std::make_shared<Passage>(type, timeout, handle, captured_)),
      results_(std::move(results)) {
  if (!timed || captured_) return;
  begin_.emplace(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT);
  begin_->record(stream);
}

std::unique_ptr<Completion> DeviceWork::completion() const {
  return completion_of(passage_);
}

void DeviceWork::attach(rust::Box<Operation> operation) {
  if (operations_.empty()) passage_->number(operation->sequence());
  operations_.push_back(std::move(operation));
}

void DeviceWork::launched(const Tensors& inputs) {
  const c10::StreamGuard guard(stream_);
  copied_ = passage_->copy_back(stream_);
  if (begin_ || beside() || copied_) {
    end_.emplace(stream_.device_type(),
                 begin_ ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT);
    end_->record(stream_);
  }
  if (beside()) {
    future_ = completed_future(inputs);
  } else {
    passage_->release();
  }
  // The profiler's record is of the call, not of what the device makes of it.
  finish();
}

void DeviceWork::give_up() {
  if (!captured_ || !beside()) return;
  c10::Event now(stream_.device_type());
  now.record(stream_);
  now.block(caller_);
}

DeviceWork::FuturePointer DeviceWork::completed_future(const Tensors& inputs) const {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(),
                                                         std::vector<at::Device>{stream_.device()});
  if (auto error = exception()) {
    future->setError(error);
    return future;
  }
  // It records events where a value is; without a value, where the inputs are.
  const c10::StreamGuard guard(stream_);
  future->markCompleted(c10::IValue(results_), storages_of(results_.empty() ? inputs : results_));
  return future;
}

bool DeviceWork::isCompleted() {
  if (passage_->ended() && !copied_) return true;
  // An event of a graph tells nothing, and asking for it would end the capture.
  return end_ && !captured_ && end_->query();
}

std::exception_ptr DeviceWork::exception() const {
  return passage_->error();
}

int DeviceWork::sourceRank() const {
  TORCH_CHECK(!operations_.empty(), "unisono: only the work of a receive has a source rank");
  // It is known once the message has come.
  if (!captured_) raise(operations_.front()->wait(-1));
  return static_cast<int>(operations_.front()->source());
}

void DeviceWork::synchronize() {
  const auto current =
      c10::impl::VirtualGuardImpl(stream_.device_type()).getStream(stream_.device());
  if (current != stream_) {
    if (end_) {
      end_->block(current);
    } else {
      // `current` then also waits for work that was put into the stream since: late, but not too
      // early.
      c10::Event now(stream_.device_type());
      now.record(stream_);
      now.block(current);
    }
  }
  if (current == caller_) passage_->release();
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  const bool limited = timeout != kNoTimeout;
  // Whoever waits for a barrier waits on the host, as with NCCL.
  if ((limited || retrieveOpType() == c10d::OpType::BARRIER) && !captured_) {
    const auto deadline = Clock::now() + (limited ? timeout : std::chrono::milliseconds(0));
    for (const auto& operation : operations_) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
      const Status status = operation->wait(limited ? std::max<int64_t>(left.count(), 0) : -1);
      if (static_cast<Code>(status.code) == Code::Interrupted) {
        passage_->handle().abort("interrupted");
      }
      raise(status);
    }
  }
  if (auto error = exception()) raise(error);
  synchronize();
  return true;
}

void DeviceWork::abort() {
  passage_->handle().abort("Work.abort() was called");
}

DeviceWork::FuturePointer DeviceWork::getFuture() {
  std::lock_guard lock(future_mutex_);
  if (!future_) future_ = completed_future({});
  return future_;
}

float DeviceWork::getDuration() const {
  if (begin_) return static_cast<float>(begin_->elapsedTime(*end_));
  const bool passed = end_ && !captured_ && end_->query();
  TORCH_CHECK(passed || passage_->ended(), "unisono: getDuration() before the work is complete");
  // As the host saw it, from the call on.
  double longest = 0;
  for (const auto& operation : operations_) {
    // The stream has got past it, which the host may not have noticed yet.
    if (passed) raise(operation->wait(-1));
    longest = std::max(longest, operation->milliseconds());
  }
  return static_cast<float>(longest);
}

uint64_t DeviceWork::getSequencenumber() const {
  return operations_.empty() ? 0 : operations_.front()->sequence();
}

}  // namespace unisono
