// Windows: tensors that each rank exposes to the others (torch 2.15 and newer).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#ifdef C10D_BACKEND_HAS_WINDOW

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "bridge.hpp"
#include "work.hpp"

namespace unisono {

// The state that the works of a window share with it.
struct Exposure {
  explicit Exposure(rust::Box<Window> made, at::Tensor exposed)
      : window(std::move(made)), tensor(std::move(exposed)) {}

  const rust::Box<Window> window;
  const at::Tensor tensor;
};

// A window over one tensor at a time, of every rank of the group.
class TensorWindow final : public c10d::Window {
 public:
  TensorWindow(std::shared_ptr<Handle> handle, int rank, int size);
  ~TensorWindow() override;

  void tensor_register(const at::Tensor& tensor, bool owning) override;
  void tensor_deregister() override;
  c10::intrusive_ptr<c10d::Work> put(const at::Tensor& tensor, int64_t dst_rank,
                                     int64_t target_offset_nelems, bool async_op,
                                     const c10d::PutOptions& opts) override;
  at::Tensor map_remote_tensor(int64_t rank) override;
  c10::intrusive_ptr<c10d::Work> signal(int64_t peer_rank, bool async_op,
                                        const c10d::SignalOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> wait_signal(int64_t peer_rank, bool async_op,
                                             const c10d::WaitSignalOptions& opts) override;
  c10d::WindowAttr get_attr(int64_t peer_rank) override;

 private:
  std::shared_ptr<Exposure> exposure() const;
  void check_rank(int64_t rank, const char* argument) const;

  const std::shared_ptr<Handle> handle_;
  const int rank_;
  const int size_;
  mutable std::mutex mutex_;
  std::shared_ptr<Exposure> exposure_;
};

// A put, a signal or a wait for one. It is driven by who waits for it.
class WindowWork final : public c10d::Work {
 public:
  // Tries to end it for at most this number of milliseconds, and below 0 for as long as it may
  // take. Returns nothing while it goes on.
  using Attempt = std::function<std::optional<Status>(int64_t)>;

  WindowWork(int rank, Attempt attempt);
  // One that has ended well.
  explicit WindowWork(int rank);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  void synchronize() override {}
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  // Whether it has ended now.
  bool attempt(int64_t timeout_ms);

  // Held by the thread that tries.
  std::timed_mutex turn_;
  // None when it has ended.
  Attempt attempt_;
  mutable std::mutex mutex_;
  bool has_ended_ = false;
  std::exception_ptr error_;
};

}  // namespace unisono

#endif
