// c10d's handle of one call, over one or several operations of the core.
#pragma once

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "bridge.hpp"
#include "buffers.hpp"
#include "observers.hpp"
#include "unisono/src/torch/bridge.rs.h"

namespace unisono {

// The core's group and who observes it, shared by a backend and those that outlive it.
struct Handle {
  explicit Handle(rust::Box<Group> group) : group(std::move(group)) {}

  const rust::Box<Group> group;
  Observers observers;
};

// A call under way.
//
// It is settled once, by whoever learns first that all its operations have ended: the thread that
// runs completions, or a thread in wait(), which drives the operations itself and does not depend
// on the other. Settling copies results into place, lets go of the tensors, ends the profiler's
// record and completes the future. Every operation's completion holds a reference, so a Work that
// its user drops still keeps its tensors until they are not needed.
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

// What the core calls when an operation of `work` has ended.
std::unique_ptr<Completion> completion(c10::intrusive_ptr<Work> work);

// Waits until every completion of every group has been called, at most `limit`.
void drain_completions(std::chrono::milliseconds limit);

}  // namespace unisono
