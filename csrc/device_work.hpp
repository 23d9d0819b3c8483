// c10d's handle of one call on device memory.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <torch/headeronly/version.h>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "streams.hpp"
#include "work.hpp"

namespace unisono {

// Lets go of a call's tensors and tells the observers, once the device has got past the call.
// Shared by the call's Work, which may be dropped before, and its operations' completions.
class Passage {
 public:
  using FuturePointer = c10::intrusive_ptr<c10::ivalue::Future>;

  // `captured`: the call becomes a part of a graph, which may run it whenever it likes. The group
  // keeps its tensors then, unless they are released.
  Passage(c10d::OpType type, std::chrono::milliseconds timeout,
          const std::shared_ptr<Handle>& handle, bool captured);
  ~Passage();

  int64_t limit() const { return std::max<int64_t>(timeout_.count(), 0); }
  std::chrono::milliseconds timeout() const { return timeout_; }
  uint64_t key() const { return key_; }
  const Handle& handle() const { return *handle_; }

  // Before the operations start: how many there are.
  void expect(size_t operations) { pending_ = operations; }
  void number(uint64_t sequence) { sequence_ = sequence; }
  // One operation has ended, or could not be started.
  void part(std::exception_ptr error);

  // Keeps tensors as they are until the device has got past the call.
  void keep(Kept&& kept);
  // Puts outputs that were received beside into place, on `stream`, which is current. False if
  // there are none.
  bool copy_back(const c10::Stream& stream) const;
  // The tensors may go: whatever is put into the stream they came from comes after the call.
  void release();
  // The Work goes.
  void retire();

  bool ended() const { return ended_.load(std::memory_order_acquire); }
  std::exception_ptr error() const;
  FuturePointer result();

 private:
  const uint64_t key_;
  const c10d::OpType type_;
  const std::chrono::steady_clock::time_point started_;
  const std::shared_ptr<Handle> handle_;
  const std::chrono::milliseconds timeout_;
  std::atomic<uint64_t> sequence_ = 0;
  std::atomic<bool> ended_ = false;
  const bool captured_;
  // A collective, which shutdown() waits for. Not a message: its other side may never come.
  const bool awaited_;

  mutable std::mutex mutex_;
  size_t pending_ = 0;
  std::exception_ptr error_;
  std::vector<Kept> kept_;
  FuturePointer result_;
};

// A call on device memory: it happens in the order of a stream, and no host thread waits for it.
//
// wait() makes the stream that is current come after the call, and returns. The future is complete
// from the beginning, and carries the device and the event after which its value may be used.
// Tensors stay alive until the device has got past the call, or until the stream that the call came
// from has been made to wait for it, because then nothing that reuses their memory can come before.
class DeviceWork final : public c10d::Work {
 public:
  // The call runs on `stream` and was made on `caller`. `timed`: with events that tell its
  // duration.
  DeviceWork(int rank, c10d::OpType type, const char* title, const Tensors& inputs, Tensors results,
             std::chrono::milliseconds timeout, const std::shared_ptr<Handle>& handle,
             const c10::Stream& stream, const c10::Stream& caller, bool captured, bool timed);
  ~DeviceWork() override { passage_->retire(); }

  Passage& passage() { return *passage_; }
  Place place() const { return unisono::place(stream_); }
  const c10::Stream& stream() const { return stream_; }

  // The completion that the core calls when one of the operations has ended.
  std::unique_ptr<Completion> completion() const;
  // After an operation has started.
  void attach(rust::Box<Operation> operation);
  // After the last one has.
  void launched(const Tensors& inputs);
  // None could be started. Brings a stream back that has joined a capture for it: the capture would
  // fail without.
  void give_up();

  bool isCompleted() override;
  bool isSuccess() const override { return exception() == nullptr; }
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  Tensors result() override { return results_; }
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void blockCurrentStream() override { synchronize(); }
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return passage_->result(); }
  float getDuration() const override;
  uint64_t getSequencenumber() const override;
#ifdef C10D_BACKEND_HAS_HOOKS
  std::chrono::milliseconds getTimeout() const override { return passage_->timeout(); }
#endif
#if TORCH_VERSION_MINOR >= 15
  uint64_t getCompletionKey() const override { return passage_->key(); }
#endif

 private:
  using FuturePointer = c10::intrusive_ptr<c10::ivalue::Future>;

  // On a stream of the backend's own.
  bool beside() const { return stream_ != caller_; }
  FuturePointer completed_future(const Tensors& inputs) const;

  const c10::Stream stream_;
  const c10::Stream caller_;
  const bool captured_;
  const std::shared_ptr<Passage> passage_;
  const Tensors results_;

  // Written before the work is handed out, read-only afterwards.
  std::optional<c10::Event> begin_;
  std::optional<c10::Event> end_;
  // Outputs are put into place after the operations.
  bool copied_ = false;
  std::vector<rust::Box<Operation>> operations_;

  std::mutex future_mutex_;
  FuturePointer future_;
};

}  // namespace unisono
