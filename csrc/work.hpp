// c10d's handle of one call, over one or several operations of the core.
#pragma once

#include <ATen/core/ivalue.h>

#include <torch/headeronly/version.h>
#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "bridge.hpp"
#include "buffers.hpp"
#include "convert.hpp"
#include "observers.hpp"
#include "unisono/src/bridge.rs.h"

namespace unisono {

// The core's group and its observers, shared by a backend and the works that outlive it.
struct Handle {
  explicit Handle(rust::Box<Group> joined)
      : group(std::move(joined)), ends_(group->ends_on_device_failure()) {}

  // Ends the group by this process's own wish: what fails of it then needs no report.
  void abort(const char* reason) const {
    left_ = true;
    group->abort(reason);
  }
  void close() const {
    left_ = true;
    group->close();
  }

  // It has other members now, and its end is to be reported again.
  void renew() const {
    left_ = false;
    reported_ = false;
    ++generation_;
  }
  // How often its members have changed.
  uint64_t generation() const { return generation_; }

  // For good: a graph may use them whenever it is run.
  void retain(std::vector<Kept> kept) {
    std::lock_guard lock(mutex_);
    std::move(kept.begin(), kept.end(), std::back_inserter(retained_));
  }

  // A collective on device memory begins; the device has got past one; until it has got past all.
  void begin_on_device() { on_device_.fetch_add(1, std::memory_order_relaxed); }
  void end_on_device() { on_device_.fetch_sub(1, std::memory_order_release); }
  void wait_for_device() const {
    wait_until([this] { return on_device_.load(std::memory_order_acquire) == 0; });
  }

  // Waits until `is_over`, which is looked at every millisecond. An exception that a signal handler
  // raises meanwhile ends the group, as in the waits of the core.
  template <typename Condition>
  void wait_until(const Condition& is_over) const {
    for (int looks = 1; !is_over(); ++looks) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (looks % 50 != 0) continue;
      const Status heard = check_signals();
      if (heard.code == 0) continue;
      abort("interrupted");
      raise(heard);
    }
  }

  // Logs once that a call on device memory has failed, even if the program never looks: the host
  // does not wait for such a call, and what comes after it in a stream reads its outputs. Ends the
  // process if the program has not heard of it soon, and the setting says so.
  void report(const std::exception_ptr& error);

  const rust::Box<Group> group;
  Observers observers;

 private:
  const bool ends_;
  mutable std::atomic<bool> left_ = false;
  mutable std::atomic<uint64_t> generation_ = 0;
  mutable std::atomic<bool> reported_ = false;
  std::atomic<size_t> on_device_ = 0;
  std::mutex mutex_;
  std::vector<Kept> retained_;
};

// A call under way.
//
// It is settled once, by the thread that first learns that all its operations have ended: the one
// that runs completions, or a thread in wait(), which drives the operations itself and does not
// depend on the other. Settling copies results into place, lets go of the tensors, ends the
// profiler's record and completes the future. Every operation's completion holds a reference, so a
// Work that its user drops still keeps its tensors until they are not needed.
class Work final : public c10d::Work {
 public:
  // `title` and `inputs` are for the profiler; `results` are what result() and the future give.
  Work(int rank, c10d::OpType type, const char* title, const Tensors& inputs, Tensors results,
       std::chrono::milliseconds timeout, const std::shared_ptr<Handle>& handle);
  ~Work() override;

  // How long its operations may take, for the core.
  int64_t limit() const { return std::max<int64_t>(timeout_.count(), 0); }

  // Before the operations start: how many there are, and what they use.
  void expect(size_t operations);
  void keep(Kept&& kept);
  // After an operation has started.
  void attach(rust::Box<Operation> operation);
  // The operation was carried out by the caller, as this one of the group.
  void number(uint64_t sequence) { sequence_ = sequence; }
  // One operation has ended, or could not be started.
  void part(std::exception_ptr error);
  // All have ended.
  void settle(std::exception_ptr error);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  Tensors result() override;
  void synchronize() override {}
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override;
#ifdef C10D_BACKEND_HAS_HOOKS
  std::chrono::milliseconds getTimeout() const override { return timeout_; }
#endif
#if TORCH_VERSION_MINOR >= 15
  uint64_t getCompletionKey() const override { return key_; }
#endif

 private:
  using FuturePointer = c10::intrusive_ptr<c10::ivalue::Future>;
  // Those that were asked for.
  struct Futures {
    FuturePointer value;
    FuturePointer result;
  };

  // Ends the work; nothing when it had ended before, else the futures to be completed.
  std::optional<Futures> end(std::exception_ptr error);
  void complete(c10::ivalue::Future& future);
  void report(c10::ivalue::Future& future);

  const uint64_t key_;
  const std::chrono::steady_clock::time_point started_;
  const std::shared_ptr<Handle> handle_;
  const std::chrono::milliseconds timeout_;
  const Tensors results_;

  std::atomic<bool> settled_ = false;
  // Guards what follows, and the act of settling.
  mutable std::mutex settling_;
  size_t pending_ = 0;
  std::exception_ptr first_error_;
  std::vector<Kept> kept_;
  Futures futures_;
  // Between the start and the end, where no operation has measured it.
  float milliseconds_ = 0;

  // Written before the work is handed out, read-only afterwards.
  std::vector<rust::Box<Operation>> operations_;
  uint64_t sequence_ = 0;
};

// Counts the completions that have been made and not yet destroyed.
class CountedCompletion : public Completion {
 public:
  CountedCompletion();
  ~CountedCompletion() override;
};

// Tells `pointer`'s object of each operation that has ended, and keeps it alive until then.
template <typename Pointer>
class PartCompletion final : public CountedCompletion {
 public:
  explicit PartCompletion(Pointer pointer) : pointer_(std::move(pointer)) {}

  void finish(const Status& status) noexcept override {
    try {
      pointer_->part(status.code == 0 ? nullptr : unisono::exception(status));
    } catch (const std::exception& error) {
      TORCH_WARN("unisono: a completion failed: ", error.what());
    }
  }

 private:
  const Pointer pointer_;
};

// The completion that the core calls when an operation of a call has ended.
template <typename Pointer>
std::unique_ptr<Completion> completion_of(Pointer pointer) {
  return std::make_unique<PartCompletion<Pointer>>(std::move(pointer));
}

// Shared by works and their observers, wherever the memory lies.

// A number that no other work of this process has.
uint64_t new_key();
// A limit and the extra time on top of it; 0 is no limit at all.
std::chrono::milliseconds extended(std::chrono::milliseconds limit,
                                   std::chrono::milliseconds extra);
// A profiler's record costs an allocation; make it only when a profiler runs.
const char* title_if_profiled(const char* title);
std::optional<Tensors> inputs_if_profiled(const Tensors& inputs);
// The value of a future that tells how a work ended: a c10d::WorkResult.
c10::IValue work_result(const Handle& handle, bool failed);

// Waits until every completion of every group has been called, at most `limit`.
void drain_completions(std::chrono::milliseconds limit);

}  // namespace unisono
