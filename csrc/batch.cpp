#include "batch.hpp"

#include <algorithm>
#include <atomic>

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

void Batch::abort() {
  if (!parts_.empty()) parts_.front()->abort();
}

Batch::FuturePointer Batch::getFuture() {
  struct Joint {
    std::atomic<size_t> left;
    FuturePointer future;
    std::vector<Part> parts;
  };
  auto joint = std::make_shared<Joint>();
  joint->left = parts_.size();
  joint->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
  joint->parts = parts_;
  if (parts_.empty()) joint->future->markCompleted(c10::IValue(Tensors()));
  for (const Part& part : parts_) {
    part->getFuture()->addCallback([joint](c10::ivalue::Future&) {
      if (--joint->left > 0) return;
      Tensors all;
      for (const Part& ended : joint->parts) {
        if (auto error = ended->exception()) return joint->future->setError(error);
        for (at::Tensor& tensor : ended->result()) all.push_back(std::move(tensor));
      }
      joint->future->markCompleted(c10::IValue(std::move(all)));
    });
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
