// all_reduce of sparse tensors: gather the entries of all ranks, add up those at the same place. A
// rank's own tensors, if there are several, are added up before.
//
//   1. all_gather of the number of entries and the shape
//   2. all_gather_v of the indices, 3. of the values
//   4. one coalesced tensor of all of them, copied to the caller's
//
// Three operations that depend on each other; they run in the calling thread, also when the call is
// asynchronous, because collectives must start in the same order on every rank.
#include <ATen/core/LegacyTypeDispatch.h>

#include "backend.hpp"
#include "convert.hpp"

namespace unisono {
namespace {

// Allocates what rank r contributes: `shape`, with `along` of that dimension.
Tensors empty_blocks(const at::Tensor& like, const Tensors& headers, int64_t along) {
  Tensors blocks;
  for (const at::Tensor& header : headers) {
    auto shape = like.sizes().vec();
    shape[along] = header[0].item<int64_t>();
    blocks.push_back(at::empty(shape, like.options()));
  }
  return blocks;
}

}  // namespace

at::Tensor Backend::sum_sparse(const at::Tensor& tensor, std::chrono::milliseconds timeout) const {
  const auto mine = tensor.coalesce();
  const auto indices = mine.indices().contiguous();
  const auto values = mine.values().contiguous();

  std::vector<int64_t> header = {mine._nnz(), mine.sparse_dim()};
  header.insert(header.end(), mine.sizes().begin(), mine.sizes().end());
  const auto own = at::tensor(header, at::kLong);
  Tensors headers;
  // Of a rank that is gone nothing comes, and it has no entries.
  auto without = own.clone();
  without[0] = 0;
  for (int rank = 0; rank < getSize(); ++rank) headers.push_back(without.clone());
  run_here(all_gather_job(headers, own), timeout);
  for (int rank = 0; rank < getSize(); ++rank) {
    if (!headers[rank].slice(0, 1).equal(own.slice(0, 1))) {
      wrong_value("tensor", c10::str("rank ", rank, " gave a sparse tensor of another shape"));
    }
  }

  const auto all_indices = empty_blocks(indices, headers, 1);
  run_here(all_gather_job(all_indices, indices), timeout);
  const auto all_values = empty_blocks(values, headers, 0);
  run_here(all_gather_job(all_values, values), timeout);
  return at::sparse_coo_tensor(at::cat(all_indices, 1), at::cat(all_values, 0), mine.sizes(),
                               mine.options())
      .coalesce();
}

Backend::WorkPointer Backend::allreduce_sparse(Tensors& tensors,
                                               const c10d::AllreduceOptions& opts) {
  const at::Tensor& tensor = root_tensor(tensors, 0);
  check_alike(tensors, tensor, "tensors");
  if (!tensor.device().is_cpu()) {
    wrong_value("tensor", c10::str("the tensor is on ", tensor.device(),
                                   ", but sparse tensors are reduced on the CPU alone; move it "
                                   "there, or make it dense"));
  }
  if (tensor.layout() != at::kSparse) {
    C10_THROW_ERROR(TypeError, "unisono: tensor: only sparse tensors in COO layout are reduced");
  }
  if (opts.reduceOp.op_ != c10d::ReduceOp::SUM) {
    wrong_value("op", "sparse tensors are reduced by SUM alone");
  }
  data_type(tensor.scalar_type());
  TORCH_CHECK(
      !window(Window::Kind::Estimate),
      "unisono: the time of a sparse all_reduce depends on the entries of all ranks, and is "
      "not estimated");
  // The profiler wants dense tensors.
  auto work = make_work({c10d::OpType::_ALLREDUCE_SPARSE, "unisono:sparse_all_reduce"}, {}, tensors,
                        opts.timeout);
  std::exception_ptr error;
  try {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto sum = sum_sparse(reduced_here(tensors, opts.reduceOp), opts.timeout);
    for (const at::Tensor& each : tensors) each.copy_(sum);
  } catch (...) {
    error = std::current_exception();
  }
  work->settle(error);
  if (error && !opts.asyncOp) raise(error);
  return work;
}

}  // namespace unisono
