// How a backend carries out calls on device memory: each is put into a stream.
#include <c10/core/StreamGuard.h>

#include <limits>
#include <utility>

#include "backend.hpp"
#include "convert.hpp"

namespace unisono {
namespace {

// After the operations of a call. One part more than there are operations was expected: the call
// must not end before its results are in place.
void complete(DeviceWork& work, const Tensors& inputs) {
  try {
    work.launched(inputs);
  } catch (...) {
    work.passage().part(std::current_exception());
    throw;
  }
  work.passage().part(nullptr);
}

}  // namespace

c10::intrusive_ptr<DeviceWork> Backend::make_work(Label label, at::Device device,
                                                  std::optional<Traffic> own, const Tensors& inputs,
                                                  Tensors results,
                                                  std::chrono::milliseconds timeout) {
  const auto caller = streams_.current(device);
  const auto stream = own ? streams_.own(caller, *own) : caller;
  const bool captured = is_capturing(caller);
  const bool exchanges = own && own->kind != Traffic::Kind::Collectives;
  if (captured && exchanges) streams_.note_in_graph(caller);
  if (captured && !exchanges) streams_.order_in_graph(stream);
  return c10::make_intrusive<DeviceWork>(
      getRank(), label.type, label.title, inputs, std::move(results),
      timeout == c10d::kUnsetTimeout ? options_->timeout : timeout, handle_, stream, caller,
      captured, timed_);
}

Backend::WorkPointer Backend::launch_on_device(Label label, std::vector<Job> jobs,
                                               const Tensors& inputs, Tensors results, Mode mode) {
  const bool own = mode.async || window(Window::Kind::Batch);
  const auto work = make_work(label, jobs.front().device(),
                              own ? std::optional<Traffic>(Traffic{}) : std::nullopt, inputs,
                              std::move(results), mode.timeout);
  Passage& passage = work->passage();
  for (Job& job : jobs) passage.keep(std::move(job.kept()));
  passage.expect(jobs.size() + 1);
  const c10::StreamGuard guard(work->stream());
  for (size_t i = 0; i < jobs.size(); ++i) {
    Started begun =
        start(*handle_->group, jobs[i].call(passage.limit(), work->place()), work->completion());
    if (begun.status.code == 0) {
      work->attach(std::move(begun.operation));
      continue;
    }
    // None of the rest is started. If nothing was, the caller hears of it at once.
    const auto error = exception(begun.status);
    for (size_t left = i; left < jobs.size(); ++left) passage.part(error);
    if (i > 0) break;
    passage.part(nullptr);
    work->give_up();
    raise(error);
  }
  complete(*work, inputs);
  return started(work, mode.async);
}

Backend::WorkPointer Backend::exchange_on_device(Label label, Job job, const at::Tensor& tensor,
                                                 int64_t peer, int tag) {
  const bool sends = label.type == c10d::OpType::SEND;
  const Traffic traffic{sends ? Traffic::Kind::Send : Traffic::Kind::Receive, peer};
  const auto work = make_work(label, job.device(), traffic, {tensor}, {tensor}, options_->timeout);
  Passage& passage = work->passage();
  passage.keep(std::move(job.kept()));
  passage.expect(2);
  const c10::StreamGuard guard(work->stream());
  const Message message =
      job.message(peer, static_cast<uint64_t>(tag), passage.limit(), work->place());
  Started begun = sends ? unisono::send(*handle_->group, message, work->completion())
                        : receive(*handle_->group, message, work->completion());
  if (begun.status.code != 0) {
    const auto error = exception(begun.status);
    passage.part(error);
    passage.part(nullptr);
    work->give_up();
    raise(error);
  }
  work->attach(std::move(begun.operation));
  complete(*work, {tensor});
  return started(work, true);
}

void Backend::drain(const c10d::BarrierOptions& opts) {
  std::vector<at::Device> devices;
  // A program may name a device on a host without one; there is nothing to be drained then.
  const auto add = [&](std::optional<at::Device> device) {
    if (device && is_there(*device)) devices.push_back(*device);
  };
  add(getBoundDeviceId());
  add(opts.device);
  for (const int64_t index : opts.device_ids) {
    constexpr int64_t most = std::numeric_limits<c10::DeviceIndex>::max();
    if (index < 0 || index > most) continue;
    add(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index)));
  }
  streams_.drain(devices);
}

Backend::WorkPointer Backend::barrier_on_device(at::Device device,
                                                const c10d::BarrierOptions& opts) {
  Tensors token;
  {
    std::lock_guard lock(token_mutex_);
    // Its content does not matter.
    if (!token_.defined()) token_ = at::empty({1}, at::TensorOptions(device).dtype(at::kByte));
    token.push_back(token_);
  }
  auto work = launch({c10d::OpType::BARRIER, "unisono:barrier"},
                     all_reduce_jobs(token, c10d::ReduceOp::MAX), token, {}, {true, opts.timeout});
  if (!opts.asyncOp && work) work->wait();
  return work;
}

void Backend::shutdown() {
  if (streams_.in_capture()) {
    wrong_value("destroy_process_group",
                "a graph is being captured in a stream that the group has used; destroy the group "
                "after the end of the capture, and when the graph is not needed any more");
  }
  // Operations in a stream may still have to run when the host is done with everything, and they
  // run on a device only with the group.
  handle_->wait_for_device();
  close();
  end_observation();
}

}  // namespace unisono
