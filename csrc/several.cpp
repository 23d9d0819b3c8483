// Calls with several tensors for each rank, which c10d has from the days of one process for several
// devices, and which gloo carries:
//
//   all_reduce   every tensor of every rank is a part of the result, and gets it
//   broadcast    one tensor of the root goes to every tensor of every rank
//   all_gather   every list gets the inputs of rank 0, then those of rank 1, and so on
//
// The core moves one vector for each rank. So a rank's own tensors are reduced to one before, and
// results are repeated after.
#include <ATen/core/LegacyTypeDispatch.h>

#include "backend.hpp"
#include "convert.hpp"

namespace unisono {
namespace {

at::Tensor combined(const at::Tensor& a, const at::Tensor& b, c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::PREMUL_SUM:
      return at::add(a, b);
    case c10d::ReduceOp::PRODUCT:
      return at::mul(a, b);
    case c10d::ReduceOp::MIN:
      return at::minimum(a, b);
    case c10d::ReduceOp::MAX:
      return at::maximum(a, b);
    case c10d::ReduceOp::BAND:
      return at::bitwise_and(a, b);
    case c10d::ReduceOp::BOR:
      return at::bitwise_or(a, b);
    case c10d::ReduceOp::BXOR:
      return at::bitwise_xor(a, b);
    default:
      wrong_value("op",
                  "of several tensors for each rank no average is taken; divide their sum instead");
  }
}

// The type to reduce in. Halves and smaller ones are rounded once at the end. torch adds no
// unsigned integers but bytes; the bits of a sum are the same for signed ones.
at::Tensor widened(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op) {
  const at::ScalarType type = tensor.scalar_type();
  if (c10::isReducedFloatingType(type)) return tensor.to(at::kFloat);
  if (op != c10d::ReduceOp::SUM && op != c10d::ReduceOp::PREMUL_SUM) return tensor;
  switch (type) {
    case at::kUInt16:
      return tensor.view(at::kShort);
    case at::kUInt32:
      return tensor.view(at::kInt);
    case at::kUInt64:
      return tensor.view(at::kLong);
    default:
      return tensor;
  }
}

at::Tensor narrowed(const at::Tensor& tensor, at::ScalarType type) {
  if (tensor.scalar_type() == type) return tensor;
  return c10::isReducedFloatingType(type) ? tensor.to(type) : tensor.view(type);
}

}  // namespace

at::Tensor Backend::reduced_here(const Tensors& tensors, const c10d::ReduceOp& op) const {
  if (tensors.size() == 1) return tensors.front();
  // This may be a thread in which autograd is on.
  at::AutoDispatchBelowADInplaceOrView guard;
  try {
    at::Tensor result = widened(tensors.front(), op.op_);
    for (size_t i = 1; i < tensors.size(); ++i) {
      result = combined(result, widened(tensors[i], op.op_), op.op_);
    }
    return narrowed(result, tensors.front().scalar_type());
  } catch (const c10::ValueError&) {
    throw;
  } catch (const c10::Error& error) {
    wrong_value("op", error.what_without_backtrace());
  }
}

Job Backend::all_reduce_several_job(const Tensors& tensors, const c10d::ReduceOp& op) const {
  for (const at::Tensor& tensor : tensors) check_tensor(tensor, "tensors");
  check_alike(tensors, tensors.front(), "tensors");
  const Reduction how = reduction(op);
  const at::Tensor result = reduced_here(tensors, op);
  Job job(Collective::AllReduce);
  job.op(how.op, how.factor, how.by);
  job.update(result, "tensors");
  job.even(result.numel());
  for (const at::Tensor& tensor : tensors) job.repeat(result, tensor, "tensors");
  return job;
}

const at::Tensor& Backend::root_tensor(const Tensors& tensors, int64_t index) const {
  if (index < 0 || static_cast<size_t>(index) >= tensors.size()) {
    wrong_value("tensors",
                c10::str("rootTensor is ", index, ", but ", tensors.size(), " tensors were given"));
  }
  return tensors[index];
}

void Backend::repeat_in_others(Job& job, const Tensors& tensors, int64_t index) const {
  if (tensors.size() == 1) return;
  check_alike(tensors, tensors.front(), "tensors");
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i != static_cast<size_t>(index)) job.repeat(tensors[index], tensors[i], "tensors");
  }
}

Job Backend::all_gather_several_job(const TensorLists& outputs, const Tensors& inputs) const {
  if (outputs.size() != inputs.size()) {
    wrong_value("output tensor lists", c10::str(outputs.size(), " lists were given for ",
                                                inputs.size(), " input tensors"));
  }
  check_alike(inputs, inputs.front(), "input tensors");
  const size_t length = inputs.size() * static_cast<size_t>(getSize());
  for (const Tensors& list : outputs) {
    if (list.size() != length) {
      wrong_value("output tensor lists",
                  c10::str("a list has ", list.size(), " tensors, but ", getSize(), " ranks times ",
                           inputs.size(), " input tensors is ", length));
    }
    check_alike(list, inputs.front(), "output tensor lists");
  }
  Job job(Collective::AllGather);
  for (const at::Tensor& input : inputs) job.read(input, "input tensors");
  for (const at::Tensor& output : outputs.front()) job.write(output, "output tensor lists");
  job.check_outputs("output tensor lists");
  job.even(inputs.front().numel() * static_cast<int64_t>(inputs.size()));
  job.part_overlap();
  for (size_t list = 1; list < outputs.size(); ++list) {
    for (size_t i = 0; i < length; ++i) {
      job.repeat(outputs.front()[i], outputs[list][i], "output tensor lists");
    }
  }
  return job;
}

}  // namespace unisono
