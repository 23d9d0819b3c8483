// Several works as one: what endCoalescing returns.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "buffers.hpp"

namespace unisono {

// The calls between startCoalescing and endCoalescing. Each call has been started by itself: a link
// carries messages of many operations at once, so nothing is gained by sending them together, and
// no order of sends and receives can block. Complete when all are; fails with the first error.
//
// Calls on device memory may be among them; `devices` are where those are.
class Batch final : public c10d::Work {
 public:
  using Part = c10::intrusive_ptr<c10d::Work>;
  using FuturePointer = c10::intrusive_ptr<c10::ivalue::Future>;

  Batch(int rank, std::vector<Part> parts, std::vector<at::Device> devices)
      : c10d::Work(rank, c10d::OpType::COALESCED),
        parts_(std::move(parts)),
        devices_(std::move(devices)) {}

  bool isCompleted() override;
  bool isSuccess() const override { return exception() == nullptr; }
  std::exception_ptr exception() const override;
  Tensors result() override;
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  FuturePointer getFuture() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override;

 private:
  const std::vector<Part> parts_;
  const std::vector<at::Device> devices_;
};

}  // namespace unisono
