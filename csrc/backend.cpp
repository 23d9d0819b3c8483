#include "backend.hpp"

#include <algorithm>
#include <utility>

#include "convert.hpp"

namespace unisono {
namespace {

using c10d::OpType;

// The number of elements of each tensor; nothing when all have the same.
std::vector<size_t> uneven_counts(const Tensors& tensors) {
  const auto differs = [&](const at::Tensor& t) { return t.numel() != tensors.front().numel(); };
  if (std::none_of(tensors.begin(), tensors.end(), differs)) return {};
  std::vector<size_t> counts;
  for (const at::Tensor& tensor : tensors) counts.push_back(tensor.numel());
  return counts;
}

std::vector<size_t> counts_of(const Tensors& tensors) {
  std::vector<size_t> counts;
  for (const at::Tensor& tensor : tensors) counts.push_back(tensor.numel());
  return counts;
}

void check_same_count(const at::Tensor& tensor, const at::Tensor& other, const char* argument,
                      const char* what) {
  if (tensor.numel() != other.numel()) {
    wrong_value(argument, c10::str("a tensor has ", tensor.numel(), " elements where ", what,
                                   " has ", other.numel()));
  }
}

// `whole` must hold exactly one `block` per rank.
void check_blocks(const at::Tensor& whole, const at::Tensor& block, int size, const char* argument,
                  const char* of) {
  if (whole.numel() != block.numel() * size) {
    wrong_value(argument,
                c10::str("the tensor has ", whole.numel(), " elements, but ", size, " ranks times ",
                         block.numel(), " elements of ", of, " is ", block.numel() * size));
  }
}

// Elements per rank from sizes along the first dimension.
std::vector<size_t> split_counts(const at::Tensor& tensor, const std::vector<int64_t>& splits,
                                 int size, const char* argument) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    if (rows % size != 0) {
      wrong_value(argument, c10::str("no split sizes were given, and ", rows,
                                     " rows do not divide among ", size, " ranks"));
    }
    return std::vector<size_t>(size, tensor.numel() / size);
  }
  if (splits.size() != static_cast<size_t>(size)) {
    wrong_value(argument, c10::str(splits.size(), " split sizes for a group of ", size, " ranks"));
  }
  int64_t sum = 0;
  for (const int64_t split : splits) {
    if (split < 0 || split > rows) {
      wrong_value(argument, c10::str("split size ", split, " is out of range"));
    }
    sum += split;
  }
  if (sum != rows) {
    wrong_value(argument, c10::str("the split sizes add up to ", sum,
                                   ", but the tensor's first dimension is ", rows));
  }
  const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  std::vector<size_t> counts;
  for (const int64_t split : splits) counts.push_back(split * row);
  return counts;
}

Tensors flatten(const std::vector<Tensors>& lists) {
  Tensors flat;
  for (const Tensors& list : lists) flat.insert(flat.end(), list.begin(), list.end());
  return flat;
}

}  // namespace

Backend::WorkPointer Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  check_rank(opts.rootRank, "src");
  const at::Tensor& tensor = root_tensor(tensors, opts.rootTensor);
  Job job(Collective::Broadcast);
  if (getRank() == opts.rootRank) {
    job.update(tensor, "tensor");
  } else {
    job.write(tensor, "tensor");
  }
  job.root(opts.rootRank);
  job.even(tensor.numel());
  repeat_in_others(job, tensors, opts.rootTensor);
  return launch({OpType::BROADCAST, "unisono:broadcast"}, std::move(job), tensors, tensors,
                {opts.asyncOp, opts.timeout});
}

std::vector<Job> Backend::all_reduce_jobs(const Tensors& tensors, const c10d::ReduceOp& op) const {
  const Reduction how = reduction(op);
  std::vector<Job> jobs;
  std::vector<std::pair<at::ScalarType, int64_t>> counts;
  for (const at::Tensor& tensor : tensors) check_tensor(tensor, "tensors");
  const auto shared = sharing(tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const auto same = [&](const auto& entry) { return entry.first == tensor.scalar_type(); };
    const auto at = std::find_if(counts.begin(), counts.end(), same) - counts.begin();
    if (static_cast<size_t>(at) == counts.size()) {
      counts.emplace_back(tensor.scalar_type(), 0);
      jobs.emplace_back(Collective::AllReduce).op(how.op, how.factor, how.by);
    }
    if (!shared.empty() && shared[i]) {
      jobs[at].update_beside(tensor, "tensors");
    } else {
      jobs[at].update(tensor, "tensors");
    }
    jobs[at].even(counts[at].second += tensor.numel());
  }
  return jobs;
}

Backend::WorkPointer Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.empty()) wrong_value("tensors", "no tensor was given");
  if (tensors.front().defined() && tensors.front().layout() == at::kSparse) {
    return allreduce_sparse(tensors, opts);
  }
  if (tensors.size() > 1) {
    return launch({OpType::ALLREDUCE, "unisono:all_reduce"},
                  all_reduce_several_job(tensors, opts.reduceOp), tensors, tensors,
                  {opts.asyncOp, opts.timeout});
  }
  return launch({OpType::ALLREDUCE, "unisono:all_reduce"}, all_reduce_jobs(tensors, opts.reduceOp),
                tensors, tensors, {opts.asyncOp, opts.timeout});
}

Backend::WorkPointer Backend::allreduce_coalesced(Tensors& tensors,
                                                  const c10d::AllreduceCoalescedOptions& opts) {
  return launch({OpType::ALLREDUCE_COALESCED, "unisono:all_reduce"},
                all_reduce_jobs(tensors, opts.reduceOp), tensors, tensors,
                {opts.asyncOp, opts.timeout});
}

Backend::WorkPointer Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = only(tensors, "tensors");
  check_rank(opts.rootRank, "dst");
  const Reduction how = reduction(opts.reduceOp);
  Job job(Collective::Reduce);
  job.op(how.op, how.factor, how.by);
  if (getRank() == opts.rootRank) {
    job.update(tensor, "tensor");
  } else {
    job.read(tensor, "tensor");
  }
  job.root(opts.rootRank);
  job.even(tensor.numel());
  return launch({OpType::REDUCE, "unisono:reduce"}, std::move(job), tensors, tensors,
                {opts.asyncOp, opts.timeout});
}

Job Backend::all_gather_job(const Tensors& outputs, const at::Tensor& input) const {
  check_length(outputs.size(), "output tensor list");
  check_same_count(outputs[getRank()], input, "output tensor list", "this rank's input");
  Job job(Collective::AllGather);
  job.read(input, "input tensor");
  for (const at::Tensor& output : outputs) job.write(output, "output tensor list");
  job.check_outputs("output tensor list");
  if (auto counts = uneven_counts(outputs); counts.empty()) {
    job.even(input.numel());
    job.part_overlap(getRank());
  } else {
    job.per_rank(std::move(counts));
    job.part_overlap();
  }
  return job;
}

Job Backend::all_gather_job(const at::Tensor& output, const at::Tensor& input) const {
  check_tensor(output, "output tensor");
  check_tensor(input, "input tensor");
  check_blocks(output, input, getSize(), "output tensor", "the input tensor");
  Job job(Collective::AllGather);
  job.read(input, "input tensor");
  job.write(output, "output tensor");
  job.even(input.numel());
  job.part_overlap(getRank());
  return job;
}

Backend::WorkPointer Backend::allgather(TensorLists& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& opts) {
  if (inputs.size() > 1) {
    return launch({OpType::ALLGATHER, "unisono:all_gather"},
                  all_gather_several_job(outputs, inputs), inputs, flatten(outputs),
                  {opts.asyncOp, opts.timeout});
  }
  const at::Tensor& input = only(inputs, "input tensors");
  const Tensors& output = only(outputs, "output tensor lists");
  return launch({OpType::ALLGATHER, "unisono:all_gather"}, all_gather_job(output, input), inputs,
                output, {opts.asyncOp, opts.timeout});
}

Backend::WorkPointer Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::AllgatherOptions& opts) {
  return launch({OpType::_ALLGATHER_BASE, "unisono:all_gather"}, all_gather_job(output, input),
                {input}, {output}, {opts.asyncOp, opts.timeout});
}

Backend::WorkPointer Backend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& opts) {
  // torch passes one list per rank, each with one tensor per input.
  check_length(outputs.size(), "output tensor lists");
  std::vector<Job> jobs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors blocks;
    for (const Tensors& list : outputs) {
      if (list.size() != inputs.size()) {
        wrong_value("output tensor lists", c10::str("a list has ", list.size(), " tensors for ",
                                                    inputs.size(), " input tensors"));
      }
      blocks.push_back(list[i]);
    }
    jobs.push_back(all_gather_job(blocks, inputs[i]));
  }
  return launch({OpType::ALLGATHER_COALESCED, "unisono:all_gather"}, std::move(jobs), inputs,
                flatten(outputs), {opts.asyncOp, opts.timeout});
}

Backend::WorkPointer Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                              const c10d::AllgatherOptions& opts) {
  if (outputs.size() != inputs.size()) {
    wrong_value("outputs", c10::str(outputs.size(), " outputs for ", inputs.size(), " inputs"));
  }
  std::vector<Job> jobs;
  for (size_t i = 0; i < inputs.size(); ++i) jobs.push_back(all_gather_job(outputs[i], inputs[i]));
  return launch({OpType::COALESCED, "unisono:all_gather"}, std::move(jobs), inputs, outputs,
                {opts.asyncOp, opts.timeout});
}

Backend::WorkPointer Backend::gather(TensorLists& outputs, Tensors& inputs,
                                     const c10d::GatherOptions& opts) {
  const at::Tensor& input = only(inputs, "input tensors");
  check_rank(opts.rootRank, "dst");
  Job job(Collective::Gather);
  job.read(input, "input tensor");
  job.root(opts.rootRank);
  job.even(input.numel());
  Tensors results;
  if (getRank() == opts.rootRank) {
    results = only(outputs, "gather list");
    check_length(results.size(), "gather list");
    for (const at::Tensor& output : results) {
      check_same_count(output, input, "gather list", "the input");
      job.write(output, "gather list");
    }
    job.check_outputs("gather list");
    job.part_overlap();
  } else if (!outputs.empty()) {
    wrong_value("gather list", "only the destination rank takes one");
  }
  return launch({OpType::GATHER, "unisono:gather"}, std::move(job), inputs, std::move(results),
                {opts.asyncOp, opts.timeout});
}

#ifdef C10D_BACKEND_HAS_HOOKS
Backend::WorkPointer Backend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                                 const c10d::GatherOptions& opts) {
  check_rank(opts.rootRank, "dst");
  check_tensor(input, "input tensor");
  Job job(Collective::Gather);
  job.read(input, "input tensor");
  job.root(opts.rootRank);
  job.even(input.numel());
  Tensors results;
  if (getRank() == opts.rootRank) {
    check_tensor(output, "output tensor");
    check_blocks(output, input, getSize(), "output tensor", "the input tensor");
    job.write(output, "output tensor");
    job.part_overlap();
    results.push_back(output);
  }
  return launch({OpType::GATHER, "unisono:gather"}, std::move(job), {input}, std::move(results),
                {opts.asyncOp, opts.timeout});
}
#endif

Backend::WorkPointer Backend::scatter(Tensors& outputs, TensorLists& inputs,
                                      const c10d::ScatterOptions& opts) {
  const at::Tensor& output = only(outputs, "output tensors");
  check_rank(opts.rootRank, "src");
  Job job(Collective::Scatter);
  job.write(output, "output tensor");
  job.root(opts.rootRank);
  job.even(output.numel());
  Tensors sent;
  if (getRank() == opts.rootRank) {
    sent = only(inputs, "scatter list");
    check_length(sent.size(), "scatter list");
    for (const at::Tensor& input : sent) {
      check_same_count(input, output, "scatter list", "the output");
      job.read(input, "scatter list");
    }
    job.part_overlap();
  } else if (!inputs.empty()) {
    wrong_value("scatter list", "only the source rank takes one");
  }
  return launch({OpType::SCATTER, "unisono:scatter"}, std::move(job), sent, outputs,
                {opts.asyncOp, opts.timeout});
}

Backend::WorkPointer Backend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                             const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = only(outputs, "output tensors");
  const Tensors& blocks = only(inputs, "input tensor lists");
  check_length(blocks.size(), "input tensor list");
  check_same_count(blocks[getRank()], output, "input tensor list", "this rank's output");
  const Reduction how = reduction(opts.reduceOp);
  Job job(Collective::ReduceScatter);
  job.op(how.op, how.factor, how.by);
  for (const at::Tensor& block : blocks) job.read(block, "input tensor list");
  job.write(output, "output tensor");
  if (auto counts = uneven_counts(blocks); counts.empty()) {
    job.even(output.numel());
  } else {
    job.per_rank(std::move(counts));
  }
  job.part_overlap();
  return launch({OpType::REDUCE_SCATTER, "unisono:reduce_scatter"}, std::move(job), blocks, outputs,
                {opts.asyncOp, opts.timeout});
}

Job Backend::reduce_scatter_job(const at::Tensor& output, const at::Tensor& input,
                                const c10d::ReduceOp& op) const {
  check_tensor(output, "output tensor");
  check_tensor(input, "input tensor");
  check_blocks(input, output, getSize(), "input tensor", "the output tensor");
  const Reduction how = reduction(op);
  Job job(Collective::ReduceScatter);
  job.op(how.op, how.factor, how.by);
  job.read(input, "input tensor");
  job.write(output, "output tensor");
  job.even(output.numel());
  job.part_overlap();
  return job;
}

Backend::WorkPointer Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& opts) {
  return launch({OpType::_REDUCE_SCATTER_BASE, "unisono:reduce_scatter"},
                reduce_scatter_job(output, input, opts.reduceOp), {input}, {output},
                {opts.asyncOp, opts.timeout});
}

Backend::WorkPointer Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  if (outputs.size() != inputs.size()) {
    wrong_value("outputs", c10::str(outputs.size(), " outputs for ", inputs.size(), " inputs"));
  }
  std::vector<Job> jobs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    jobs.push_back(reduce_scatter_job(outputs[i], inputs[i], opts.reduceOp));
  }
  return launch({OpType::COALESCED, "unisono:reduce_scatter"}, std::move(jobs), inputs, outputs,
                {opts.asyncOp, opts.timeout});
}

Backend::WorkPointer Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                            std::vector<int64_t>& output_splits,
                                            std::vector<int64_t>& input_splits,
                                            const c10d::AllToAllOptions& opts) {
  check_tensor(output, "output tensor");
  check_tensor(input, "input tensor");
  auto recv = split_counts(output, output_splits, getSize(), "output split sizes");
  auto send = split_counts(input, input_splits, getSize(), "input split sizes");
  Job job(Collective::AllToAll);
  job.read(input, "input tensor");
  job.write(output, "output tensor");
  if (output_splits.empty() && input_splits.empty()) {
    check_same_count(output, input, "output tensor", "the input");
  }
  // Also where they are equal: another rank may have given sizes that happen to be.
  job.per_pair(std::move(send), std::move(recv));
  job.part_overlap();
  return launch({OpType::ALLTOALL_BASE, "unisono:all_to_all"}, std::move(job), {input}, {output},
                {opts.asyncOp, opts.timeout});
}

Backend::WorkPointer Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllToAllOptions& opts) {
  check_length(outputs.size(), "output tensor list");
  check_length(inputs.size(), "input tensor list");
  check_same_count(outputs[getRank()], inputs[getRank()], "output tensor list",
                   "this rank's input for itself");
  Job job(Collective::AllToAll);
  for (const at::Tensor& input : inputs) job.read(input, "input tensor list");
  for (const at::Tensor& output : outputs) job.write(output, "output tensor list");
  job.check_outputs("output tensor list");
  job.per_pair(counts_of(inputs), counts_of(outputs));
  job.part_overlap();
  return launch({OpType::ALLTOALL, "unisono:all_to_all"}, std::move(job), inputs, outputs,
                {opts.asyncOp, opts.timeout});
}

}  // namespace unisono
