// How a backend carries out what the methods in backend.cpp have prepared; point-to-point.
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "backend.hpp"
#include "convert.hpp"

namespace unisono {

using c10d::OpType;

namespace {

bool is_even(const std::vector<size_t>& counts) {
  return std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) == counts.end();
}

// NCCL's names of collectives, which readers of traces know.
const char* recorded_name(const Job& job) {
  switch (job.collective()) {
    case Collective::AllReduce:
      return "allreduce";
    case Collective::Reduce:
      return "reduce";
    case Collective::Broadcast:
      return "broadcast";
    case Collective::AllGather:
      return "allgather";
    case Collective::ReduceScatter:
      return "reduce_scatter";
    case Collective::Gather:
      return "gather";
    case Collective::Scatter:
      return "scatter";
    case Collective::AllToAll:
      return is_even(job.counts()) && is_even(job.recv_counts()) ? "all_to_all" : "all_to_allv";
    case Collective::Barrier:
      return "barrier";
    case Collective::Send:
      return "send";
    case Collective::Recv:
      return "recv";
  }
  return "unknown";
}

bool has_root(Collective collective) {
  return collective == Collective::Reduce || collective == Collective::Broadcast ||
         collective == Collective::Gather || collective == Collective::Scatter;
}

}  // namespace

std::unique_ptr<Span> Backend::span(Label label, c10::ArrayRef<Job> jobs, bool async) const {
  if (!at::hasCallbacks() || jobs.empty()) return nullptr;
  const Job& job = jobs.front();
  const Collective collective = job.collective();
  int64_t in = 0;
  int64_t out = 0;
  for (const Job& one : jobs) {
    in += one.elements_in();
    out += one.elements_out();
  }
  if (label.type == OpType::BARRIER) in = out = 0;
  const bool is_alike = collective == Collective::AllReduce || collective == Collective::Reduce ||
                        collective == Collective::Broadcast;
  if (is_alike) in = out = std::max(in, out);
  // Its contribution lies in the output.
  if (collective == Collective::AllGather && in == 0) in = out / getSize();
  std::vector<int64_t> splits_in;
  std::vector<int64_t> splits_out;
  if (!is_even(job.counts()) || !is_even(job.recv_counts())) {
    splits_in.assign(job.counts().begin(), job.counts().end());
    splits_out.assign(job.recv_counts().begin(), job.recv_counts().end());
  }
  return span({.name = label.type == OpType::BARRIER ? "barrier" : recorded_name(job),
               .rank = has_root(collective) ? job.root() : getRank(),
               .elements_in = in,
               .elements_out = out,
               .type = job.type(),
               .splits_in = std::move(splits_in),
               .splits_out = std::move(splits_out),
               .async = async,
               .sequence = static_cast<int64_t>(handle_->group->sequence()) + 1});
}

std::unique_ptr<Span> Backend::span(Recorded call) const {
  call.group = getGroupUid();
  call.description = getGroupDesc();
  call.size = getSize();
  const auto& ranks = options_->global_ranks_in_group;
  if (ranks.size() > 1) {
    call.first = static_cast<int64_t>(ranks[0]);
    call.stride = static_cast<int64_t>(ranks[1]) - call.first;
    for (size_t i = 2; i < ranks.size(); ++i) {
      if (static_cast<int64_t>(ranks[i]) != call.first + static_cast<int64_t>(i) * call.stride) {
        call.stride = -1;
      }
    }
  } else if (ranks.size() == 1) {
    call.first = static_cast<int64_t>(ranks[0]);
  }
  return std::make_unique<Span>(call);
}

void Backend::check(const Status& status) const {
  if (status.code == 0) return;
  if (handle_->group->error().code != 0) handle_->observers.dead();
  raise(status);
}

c10::intrusive_ptr<Work> Backend::make_work(Label label, const Tensors& inputs, Tensors results,
                                            std::chrono::milliseconds timeout) const {
  return c10::make_intrusive<Work>(getRank(), label.type, label.title, inputs, std::move(results),
                                   timeout == c10d::kUnsetTimeout ? options_->timeout : timeout,
                                   handle_);
}

Backend::WorkPointer Backend::launch(Label label, Job job, const Tensors& inputs, Tensors results,
                                     Mode mode) {
  std::vector<Job> jobs;
  jobs.push_back(std::move(job));
  return launch(label, std::move(jobs), inputs, std::move(results), mode);
}

Backend::WorkPointer Backend::launch(Label label, std::vector<Job> jobs, const Tensors& inputs,
                                     Tensors results, Mode mode) {
  if (Window* const window = this->window(Window::Kind::Estimate)) {
    double microseconds = 0;
    for (const Job& job : jobs) microseconds += estimate(*handle_->group, job.call(-1));
    return estimated(*window, microseconds);
  }
  for (const Job& job : jobs) {
    if (job.device() != jobs.front().device()) {
      wrong_value("tensors",
                  c10::str("a tensor is on ", job.device(), " where others are on ",
                           jobs.front().device(), "; all tensors of a call must be on one device"));
    }
  }
  const auto recorded = span(label, jobs, mode.async);
  if (!jobs.empty() && !jobs.front().device().is_cpu()) {
    return launch_on_device(label, std::move(jobs), inputs, std::move(results), mode);
  }
  const bool coalesced = window(Window::Kind::Batch) != nullptr;
  auto work = make_work(label, inputs, std::move(results), mode.timeout);
  for (Job& job : jobs) work->keep(std::move(job.kept()));
  if (jobs.empty() || (!mode.async && !coalesced)) {
    std::exception_ptr error;
    for (auto job = jobs.begin(); job != jobs.end() && !error; ++job) {
      const Ran ran = run(*handle_->group, job->call(work->limit()));
      work->number(ran.sequence);
      if (ran.status.code != 0) error = exception(ran.status);
    }
    work->settle(error);
    if (error) raise(error);
    return work;
  }
  // One more than there are operations: the work must not end before all are attached to it.
  work->expect(jobs.size() + 1);
  for (size_t i = 0; i < jobs.size(); ++i) {
    Started begun = start(*handle_->group, jobs[i].call(work->limit()), completion_of(work));
    if (begun.status.code == 0) {
      work->attach(std::move(begun.operation));
      continue;
    }
    // None of the rest is started. If nothing was, the caller hears of it at once.
    const auto error = exception(begun.status);
    for (size_t left = i; left < jobs.size(); ++left) work->part(error);
    work->part(nullptr);
    if (i == 0) raise(error);
    return started(std::move(work), mode.async);
  }
  work->part(nullptr);
  return started(std::move(work), mode.async);
}

void Backend::run_here(const Job& job, std::chrono::milliseconds timeout) const {
  check(run(*handle_->group, job.call(milliseconds(timeout))).status);
}

void Backend::carry_out(const Job& job) const {
  const auto recorded = span({OpType::UNKNOWN, nullptr}, job, false);
  run_here(job, c10d::kUnsetTimeout);
  for (const auto& [to, from] : job.kept().copies) to.copy_(from);
}

void Backend::all_reduce_int8(const at::Tensor& tensor, bool average) const {
  const rust::Slice<float> values{tensor.mutable_data_ptr<float>(),
                                  static_cast<size_t>(tensor.numel())};
  std::unique_ptr<Span> recorded;
  if (at::hasCallbacks()) {
    recorded = span({.name = "allreduce",
                     .rank = getRank(),
                     .elements_in = tensor.numel(),
                     .elements_out = tensor.numel(),
                     .type = tensor.scalar_type()});
  }
  check(handle_->group->all_reduce_int8(values, average));
}

Backend::WorkPointer Backend::exchange(Label label, const at::Tensor& tensor, int64_t peer,
                                       int tag) {
  if (tag < 0) wrong_value("tag", c10::str(tag, " is negative"));
  const bool sends = label.type == OpType::SEND;
  if (Window* const window = this->window(Window::Kind::Estimate)) {
    return estimated(*window, estimate_message(*handle_->group, peer, tensor.nbytes()));
  }
  Window* const batch = window(Window::Kind::Batch);
  if (batch && (sends ? peer == getRank() : !tensor.is_cpu())) {
    check_tensor(tensor, "tensor");
    moved_type(tensor.scalar_type());
    std::optional<c10::Stream> caller;
    if (!tensor.is_cpu()) caller = streams_.current(tensor.device());
    (sends ? batch->sends_to_self : batch->receives).push_back([=, this] {
      const c10::OptionalStreamGuard guard(caller);
      return exchange(label, tensor, peer, tag);
    });
    return nullptr;
  }
  Job job(sends ? Collective::Send : Collective::Recv);
  if (sends) {
    job.read(tensor, "tensor");
  } else {
    job.write(tensor, "tensor");
  }
  std::unique_ptr<Span> recorded;
  if (at::hasCallbacks()) {
    recorded = span({.name = sends ? "send" : "recv",
                     .rank = peer,
                     .elements_in = tensor.numel(),
                     .elements_out = tensor.numel(),
                     .type = tensor.scalar_type(),
                     .async = true,
                     .is_message = true});
  }
  if (!job.device().is_cpu()) return exchange_on_device(label, std::move(job), tensor, peer, tag);
  auto work = make_work(label, {tensor}, {tensor}, options_->timeout);
  work->keep(std::move(job.kept()));
  work->expect(2);
  const Message message = job.message(peer, static_cast<uint64_t>(tag), work->limit());
  Started begun = sends ? unisono::send(*handle_->group, message, completion_of(work))
                        : unisono::receive(*handle_->group, message, completion_of(work));
  if (begun.status.code != 0) {
    const auto error = exception(begun.status);
    work->settle(error);
    raise(error);
  }
  work->attach(std::move(begun.operation));
  work->part(nullptr);
  return started(std::move(work), true);
}

Backend::WorkPointer Backend::send(Tensors& tensors, int to, int tag) {
  check_rank(to, "dst");
  return exchange({OpType::SEND, "unisono:send"}, only(tensors, "tensors"), to, tag);
}

Backend::WorkPointer Backend::recv(Tensors& tensors, int from, int tag) {
  check_rank(from, "src");
  return exchange({OpType::RECV, "unisono:recv"}, only(tensors, "tensors"), from, tag);
}

Backend::WorkPointer Backend::recvAnysource(Tensors& tensors, int tag) {
  return exchange({OpType::RECVANYSOURCE, "unisono:recvAnySource"}, only(tensors, "tensors"), -1,
                  tag);
}

Backend::WorkPointer Backend::barrier(const c10d::BarrierOptions& opts) {
  const bool estimates = window(Window::Kind::Estimate) != nullptr;
  if (!opts.asyncOp && !estimates) drain(opts);
  // Where all ranks have bound the group to a device, they meet there, in the order of streams.
  const auto bound = getBoundDeviceId();
  if (bound && is_there(*bound) && !estimates) return barrier_on_device(*bound, opts);
  if (opts.asyncOp && !estimates) drain(opts);
  return launch({OpType::BARRIER, "unisono:barrier"}, Job(Collective::Barrier), {}, {},
                {opts.asyncOp, opts.timeout});
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const auto timeout = opts.timeout == c10d::kUnsetTimeout ? options_->timeout : opts.timeout;
  check(handle_->group->monitored_barrier(timeout.count(), wait_all_ranks));
}

const at::Tensor& Backend::only(const Tensors& tensors, const char* argument) const {
  if (tensors.size() != 1) {
    wrong_value(argument, c10::str(tensors.size(), " tensors were given; it takes one per rank"));
  }
  return tensors.front();
}

const Tensors& Backend::only(const TensorLists& lists, const char* argument) const {
  if (lists.size() != 1) {
    wrong_value(argument, c10::str(lists.size(), " lists were given; it takes one per rank"));
  }
  return lists.front();
}

void Backend::check_length(size_t length, const char* argument) const {
  if (length != static_cast<size_t>(getSize())) {
    wrong_value(argument,
                c10::str("it has ", length, " entries for a group of ", getSize(), " ranks"));
  }
}

void Backend::check_rank(int64_t rank, const char* argument) const {
  if (rank < 0 || rank >= getSize()) {
    wrong_value(argument,
                c10::str("rank ", rank, " is out of range; the group has ", getSize(), " ranks"));
  }
}

}  // namespace unisono
