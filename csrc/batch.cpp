#include "batch.hpp"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <atomic>

#include "streams.hpp"

namespace unisono {

bool Batch::isCompleted() {
  return std::all_of(parts_.begin(), parts_.end(), [](auto& part) { return part->isCompleted(); });
}

std::exception_ptr Batch::exception() const {
  for (const Part& part : parts_) {
    if (auto error = part->exception()) return error;
  }
  return nullptr;
}

Tensors Batch::result() {
  Tensors all;
  for (const Part& part : parts_) {
    for (at::Tensor& tensor : part->result()) all.push_back(std::move(tensor));
  }
  return all;
}

bool Batch::wait(std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + timeout;
  for (const Part& part : parts_) {
    auto left = timeout;
    if (timeout != kNoTimeout) {
      // 0 would be no limit at all.
      left = std::max(std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()),
                      std::chrono::milliseconds(1));
    }
    part->wait(left);
  }
  return true;
}

void Batch::synchronize() {
  for (const Part& part : parts_) part->synchronize();
}

void Batch::abort() {
  if (!parts_.empty()) parts_.front()->abort();
}

namespace {

// The future of a batch while parts of it are under way.
struct Joint {
  std::atomic<size_t> left;
  Batch::FuturePointer future;
  std::vector<Batch::Part> parts;

  void complete() {
    try {
      join();
    } catch (...) {
      // A callback's is its own.
      if (future->completed()) throw;
      future->setError(std::current_exception());
    }
  }

  void join() {
    Tensors all;
    for (const auto& part : parts) {
      if (auto error = part->exception()) return future->setError(error);
      for (at::Tensor& tensor : part->result()) all.push_back(std::move(tensor));
    }
    // The future records events in the streams that are current, so these come after every part.
    // Not streams of torch's pool: other work may run in them, which would then also come after
    // every part.
    std::vector<OwnedStream> owned;
    std::vector<c10::Stream> streams;
    for (const at::Device device : future->devices()) {
      streams.push_back(owned.emplace_back(device).get());
    }
    const c10::MultiStreamGuard guard(streams);
    for (const auto& part : parts) part->synchronize();
    future->markCompleted(c10::IValue(std::move(all)));
  }
};

}  // namespace

Batch::FuturePointer Batch::getFuture() {
  auto joint = std::make_shared<Joint>();
  joint->left = parts_.size();
  joint->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), devices_);
  joint->parts = parts_;
  if (parts_.empty()) joint->complete();
  for (const Part& part : parts_) {
    const auto ended = [joint](c10::ivalue::Future&) {
      if (--joint->left == 0) joint->complete();
    };
    // It orders the streams itself.
    part->getFuture()->addCallback(ended, /*uses_future=*/false);
  }
  return joint->future;
}

float Batch::getDuration() const {
  float longest = 0;
  for (const Part& part : parts_) longest = std::max(longest, part->getDuration());
  return longest;
}

uint64_t Batch::getSequencenumber() const {
  return parts_.empty() ? 0 : parts_.front()->getSequencenumber();
}

}  // namespace unisono
