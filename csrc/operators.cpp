// Collectives as operators of torch's dispatcher: torch.ops.unisono.all_reduce_ and others.
//
// For what is called many times a token and inside torch.compile. A call names its group, as
// torch's own functional collectives do, and blocks: on the CPU it is carried out in the calling
// thread, on a device it is put into the current stream. Without a c10d work, and unseen by what
// watches works (torch's flight recorder, completion hooks): it costs the dispatcher and the
// operation itself.
//
// The operators that write to their argument return nothing, which is what torch.compile asks of an
// operator that it is to make functional by itself.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "backend.hpp"
#include "convert.hpp"
#include "registry.hpp"

namespace unisono {
namespace {

using c10::string_view;

c10d::ReduceOp operator_named(string_view name) {
  static const std::pair<string_view, c10d::ReduceOp::RedOpType> names[] = {
      {"sum", c10d::ReduceOp::SUM},         {"avg", c10d::ReduceOp::AVG},
      {"product", c10d::ReduceOp::PRODUCT}, {"min", c10d::ReduceOp::MIN},
      {"max", c10d::ReduceOp::MAX},         {"band", c10d::ReduceOp::BAND},
      {"bor", c10d::ReduceOp::BOR},         {"bxor", c10d::ReduceOp::BXOR},
  };
  for (const auto& [known, type] : names) {
    if (name == known) return type;
  }
  wrong_value("op",
              c10::str("\"", name, "\" is none of sum, avg, product, min, max, band, bor, bxor"));
}

// The backend that serves a group. `directly` is the same one as unisono's class: null on devices,
// and where torch wraps the backend (TORCH_DISTRIBUTED_DEBUG=DETAIL).
struct Served {
  c10::intrusive_ptr<c10d::Backend> by;
  Backend* directly;
};

c10::intrusive_ptr<c10d::ProcessGroup> group_named(string_view name) {
  return c10d::resolve_process_group(std::string(name));
}

Served served(string_view group, const at::Tensor& tensor) {
  auto by = group_named(group)->getBackend(tensor.device().type());
  auto* directly = tensor.is_cpu() ? dynamic_cast<Backend*>(by.get()) : nullptr;
  if (directly == nullptr && by->getBackendName() != "unisono") {
    wrong_value("group", c10::str("the group \"", group, "\" is served by ", by->getBackendName(),
                                  " and not by unisono"));
  }
  return {std::move(by), directly};
}

int64_t living_ranks(string_view name) {
  const auto group = group_named(name);
  const auto* backend = backend_of(group);
  return backend != nullptr ? backend->living() : group->getSize();
}

std::vector<int64_t> mask_group(string_view name, at::IntArrayRef exclude) {
  const auto group = group_named(name);
  auto* backend = backend_of(group);
  if (backend == nullptr) {
    wrong_value("group", c10::str("the group \"", name, "\" is not served by unisono"));
  }
  return backend->mask(exclude.vec());
}

std::string group_stats(string_view name) {
  const auto* backend = backend_of(group_named(name));
  if (backend == nullptr) {
    wrong_value("group", c10::str("the group \"", name, "\" is not served by unisono"));
  }
  return backend->stats();
}

void wait(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work) work->wait();
}

void all_reduce_in_place(const at::Tensor& tensor, string_view group, string_view op) {
  const Served served = unisono::served(group, tensor);
  if (served.directly) {
    Job job(Collective::AllReduce);
    const Reduction how = reduction(operator_named(op));
    job.op(how.op, how.factor, how.by);
    job.update(tensor, "tensor");
    job.even(tensor.numel());
    return served.directly->carry_out(job);
  }
  Tensors tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = operator_named(op);
  options.asyncOp = false;
  wait(served.by->allreduce(tensors, options));
}

// float32 between hosts in 8 bits, as the core's `all_reduce_int8` says.
void all_reduce_int8_in_place(const at::Tensor& tensor, string_view group, string_view op) {
  if (op != "sum" && op != "avg") {
    wrong_value("op", c10::str("\"", op, "\" is not made of 8 bits; sum and avg are"));
  }
  const bool fits = tensor.is_cpu() && tensor.scalar_type() == at::kFloat && tensor.is_contiguous();
  if (!fits || reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % alignof(float) != 0) {
    wrong_value(
        "tensor",
        c10::str("it is ", tensor.toString(), tensor.is_contiguous() ? "" : " and not contiguous",
                 "; contiguous and aligned float32 on the CPU is sent in 8 bits"));
  }
  const Served served = unisono::served(group, tensor);
  if (!served.directly) return all_reduce_in_place(tensor, group, op);
  served.directly->all_reduce_int8(tensor, op == "avg");
}

at::Tensor all_reduce(const at::Tensor& tensor, string_view group, string_view op) {
  const Served served = unisono::served(group, tensor);
  auto result = at::empty_like(tensor, at::MemoryFormat::Contiguous);
  if (served.directly) {
    Job job(Collective::AllReduce);
    const Reduction how = reduction(operator_named(op));
    job.op(how.op, how.factor, how.by);
    job.read(tensor, "tensor");
    job.write(result, "tensor");
    job.even(tensor.numel());
    served.directly->carry_out(job);
  } else {
    result.copy_(tensor);
    all_reduce_in_place(result, group, op);
  }
  return result;
}

// The sizes of `tensor` with `rows` along the first dimension.
c10::SymDimVector with_rows(const at::Tensor& tensor, c10::SymInt rows) {
  c10::SymDimVector sizes(tensor.sym_sizes());
  if (sizes.empty()) sizes.resize(1);
  sizes[0] = std::move(rows);
  return sizes;
}

at::Tensor gathered_like(const at::Tensor& tensor, int64_t ranks) {
  const auto rows = tensor.dim() == 0 ? c10::SymInt(1) : tensor.sym_size(0);
  return tensor.new_empty_symint(with_rows(tensor, rows * ranks));
}

at::Tensor scattered_like(const at::Tensor& tensor, int64_t ranks) {
  if (tensor.dim() == 0)
    wrong_value("tensor", "a tensor without dimensions has no rows to scatter");
  const auto rows = tensor.sym_size(0);
  if (rows % ranks != 0) {
    wrong_value("tensor", c10::str(rows, " rows do not divide among ", ranks, " ranks"));
  }
  return tensor.new_empty_symint(with_rows(tensor, rows / ranks));
}

at::Tensor all_gather(const at::Tensor& tensor, string_view group) {
  const Served served = unisono::served(group, tensor);
  auto result = gathered_like(tensor, served.by->getSize());
  // Of ranks that are gone nothing comes.
  const auto* backend = dynamic_cast<const Backend*>(served.by.get());
  if (backend != nullptr && backend->living() < backend->getSize()) result.zero_();
  if (served.directly) {
    served.directly->carry_out(served.directly->all_gather_job(result, tensor));
  } else {
    auto input = tensor.contiguous();
    c10d::AllgatherOptions options;
    options.asyncOp = false;
    wait(served.by->_allgather_base(result, input, options));
  }
  return result;
}

at::Tensor reduce_scatter(const at::Tensor& tensor, string_view group, string_view op) {
  const Served served = unisono::served(group, tensor);
  auto result = scattered_like(tensor, served.by->getSize());
  if (served.directly) {
    served.directly->carry_out(
        served.directly->reduce_scatter_job(result, tensor, operator_named(op)));
  } else {
    auto input = tensor.contiguous();
    c10d::ReduceScatterOptions options;
    options.reduceOp = operator_named(op);
    options.asyncOp = false;
    wait(served.by->_reduce_scatter_base(result, input, options));
  }
  return result;
}

void broadcast_in_place(const at::Tensor& tensor, string_view group, int64_t src) {
  const Served served = unisono::served(group, tensor);
  Tensors tensors{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = src;
  options.asyncOp = false;
  wait(served.by->broadcast(tensors, options));
}

at::Tensor broadcast(const at::Tensor& tensor, string_view group, int64_t src) {
  auto result = tensor.clone(at::MemoryFormat::Contiguous);
  broadcast_in_place(result, group, src);
  return result;
}

// The shapes and types of the results, for tensors without memory.
namespace shapes {

int64_t ranks(string_view group) {
  return group_named(group)->getSize();
}

void all_reduce_in_place(const at::Tensor&, string_view, string_view) {}

void all_reduce_int8_in_place(const at::Tensor&, string_view, string_view) {}

void broadcast_in_place(const at::Tensor&, string_view, int64_t) {}

at::Tensor all_reduce(const at::Tensor& tensor, string_view, string_view) {
  return at::empty_like(tensor, at::MemoryFormat::Contiguous);
}

at::Tensor broadcast(const at::Tensor& tensor, string_view, int64_t) {
  return at::empty_like(tensor, at::MemoryFormat::Contiguous);
}

at::Tensor all_gather(const at::Tensor& tensor, string_view group) {
  return gathered_like(tensor, ranks(group));
}

at::Tensor reduce_scatter(const at::Tensor& tensor, string_view group, string_view) {
  return scattered_like(tensor, ranks(group));
}

}  // namespace shapes

// Derivatives. The contributions of all ranks' results to the loss add up: so the gradient of a sum
// is the sum of the gradients, as in torch.distributed.nn.
namespace derivatives {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

template <typename Signature>
auto operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

at::Tensor call_all_reduce(const at::Tensor& tensor, string_view group, string_view op) {
  static const auto handle =
      operator_of<at::Tensor(const at::Tensor&, string_view, string_view)>("unisono::all_reduce");
  return handle.call(tensor, group, op);
}

at::Tensor call_all_gather(const at::Tensor& tensor, string_view group) {
  static const auto handle =
      operator_of<at::Tensor(const at::Tensor&, string_view)>("unisono::all_gather");
  return handle.call(tensor, group);
}

at::Tensor call_reduce_scatter(const at::Tensor& tensor, string_view group, string_view op) {
  static const auto handle = operator_of<at::Tensor(const at::Tensor&, string_view, string_view)>(
      "unisono::reduce_scatter");
  return handle.call(tensor, group, op);
}

at::Tensor call_broadcast(const at::Tensor& tensor, string_view group, int64_t src) {
  static const auto handle =
      operator_of<at::Tensor(const at::Tensor&, string_view, int64_t)>("unisono::broadcast");
  return handle.call(tensor, group, src);
}

bool wants_gradient(const at::Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad();
}

void check_linear(string_view op) {
  if (op != "sum" && op != "avg") {
    wrong_value("op", c10::str("\"", op, "\" has no derivative here; sum and avg have one"));
  }
}

struct AllReduce : torch::autograd::Function<AllReduce> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor,
                            const std::string& group, const std::string& op) {
    check_linear(op);
    context->saved_data["group"] = group;
    context->saved_data["op"] = op;
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_all_reduce(tensor, group, op);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto gradient = call_all_reduce(gradients[0], context->saved_data["group"].toStringView(),
                                          context->saved_data["op"].toStringView());
    return {gradient, Variable(), Variable()};
  }
};

struct AllGather : torch::autograd::Function<AllGather> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor,
                            const std::string& group) {
    context->saved_data["group"] = group;
    context->saved_data["has_rows"] = tensor.dim() > 0;
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_all_gather(tensor, group);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto gradient =
        call_reduce_scatter(gradients[0], context->saved_data["group"].toStringView(), "sum");
    if (!context->saved_data["has_rows"].toBool()) gradient = gradient.squeeze(0);
    return {gradient, Variable()};
  }
};

struct ReduceScatter : torch::autograd::Function<ReduceScatter> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor,
                            const std::string& group, const std::string& op) {
    check_linear(op);
    context->saved_data["group"] = group;
    context->saved_data["parts"] = op == "avg" ? living_ranks(group) : int64_t{1};
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_reduce_scatter(tensor, group, op);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto parts = context->saved_data["parts"].toInt();
    const auto gradient = parts == 1 ? gradients[0] : gradients[0] / parts;
    return {call_all_gather(gradient, context->saved_data["group"].toStringView()), Variable(),
            Variable()};
  }
};

struct Broadcast : torch::autograd::Function<Broadcast> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor,
                            const std::string& group, int64_t src) {
    context->saved_data["group"] = group;
    context->saved_data["is_source"] = group_named(group)->getRank() == src;
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_broadcast(tensor, group, src);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto gradient =
        call_all_reduce(gradients[0], context->saved_data["group"].toStringView(), "sum");
    if (!context->saved_data["is_source"].toBool()) gradient = at::zeros_like(gradient);
    return {gradient, Variable(), Variable()};
  }
};

at::Tensor all_reduce(const at::Tensor& tensor, string_view group, string_view op) {
  if (wants_gradient(tensor)) return AllReduce::apply(tensor, std::string(group), std::string(op));
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_all_reduce(tensor, group, op);
}

at::Tensor all_gather(const at::Tensor& tensor, string_view group) {
  if (wants_gradient(tensor)) return AllGather::apply(tensor, std::string(group));
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_all_gather(tensor, group);
}

at::Tensor reduce_scatter(const at::Tensor& tensor, string_view group, string_view op) {
  if (wants_gradient(tensor)) {
    return ReduceScatter::apply(tensor, std::string(group), std::string(op));
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_reduce_scatter(tensor, group, op);
}

at::Tensor broadcast(const at::Tensor& tensor, string_view group, int64_t src) {
  if (wants_gradient(tensor)) return Broadcast::apply(tensor, std::string(group), src);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_broadcast(tensor, group, src);
}

// Autograd would take what was saved of the tensor before for what it holds now.
void note_write(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

void refuse_gradient(const at::Tensor& tensor, const char* other) {
  if (wants_gradient(tensor)) {
    wrong_value("tensor",
                c10::str("it requires a gradient, which an operation in place would lose; use ",
                         "torch.ops.unisono.", other, ", or torch.no_grad()"));
  }
}

void all_reduce_in_place(const at::Tensor& tensor, string_view group, string_view op) {
  refuse_gradient(tensor, "all_reduce");
  static const auto handle =
      operator_of<void(const at::Tensor&, string_view, string_view)>("unisono::all_reduce_");
  const at::AutoDispatchBelowADInplaceOrView below;
  handle.call(tensor, group, op);
  note_write(tensor);
}

void all_reduce_int8_in_place(const at::Tensor& tensor, string_view group, string_view op) {
  refuse_gradient(tensor, "all_reduce");
  static const auto handle =
      operator_of<void(const at::Tensor&, string_view, string_view)>("unisono::all_reduce_int8_");
  const at::AutoDispatchBelowADInplaceOrView below;
  handle.call(tensor, group, op);
  note_write(tensor);
}

void broadcast_in_place(const at::Tensor& tensor, string_view group, int64_t src) {
  refuse_gradient(tensor, "broadcast");
  static const auto handle =
      operator_of<void(const at::Tensor&, string_view, int64_t)>("unisono::broadcast_");
  const at::AutoDispatchBelowADInplaceOrView below;
  handle.call(tensor, group, src);
  note_write(tensor);
}

}  // namespace derivatives

// For each kind of tensor its functions, which have the same names.
#define UNISONO_IMPLEMENT(library, functions)                                \
  do {                                                                       \
    (library).impl("all_reduce", functions::all_reduce);                     \
    (library).impl("all_reduce_", functions::all_reduce_in_place);           \
    (library).impl("all_reduce_int8_", functions::all_reduce_int8_in_place); \
    (library).impl("all_gather", functions::all_gather);                     \
    (library).impl("reduce_scatter", functions::reduce_scatter);             \
    (library).impl("broadcast", functions::broadcast);                       \
    (library).impl("broadcast_", functions::broadcast_in_place);             \
  } while (false)

}  // namespace

void define_operators(torch::Library& library) {
  library.def("all_reduce(Tensor tensor, str group, str op='sum') -> Tensor");
  library.def("all_reduce_(Tensor(a!) tensor, str group, str op='sum') -> ()");
  library.def("all_reduce_int8_(Tensor(a!) tensor, str group, str op='sum') -> ()");
  library.def("all_gather(Tensor tensor, str group) -> Tensor");
  library.def("reduce_scatter(Tensor tensor, str group, str op='sum') -> Tensor");
  library.def("broadcast(Tensor tensor, str group, int src) -> Tensor");
  library.def("broadcast_(Tensor(a!) tensor, str group, int src) -> ()");
  library.def("mask(str group, int[] exclude) -> int[]", mask_group);
  library.def("stats(str group) -> str", group_stats);
}

TORCH_LIBRARY_IMPL(unisono, CPU, library) {
  UNISONO_IMPLEMENT(library, unisono);
}

TORCH_LIBRARY_IMPL(unisono, CUDA, library) {
  UNISONO_IMPLEMENT(library, unisono);
}

TORCH_LIBRARY_IMPL(unisono, Meta, library) {
  UNISONO_IMPLEMENT(library, shapes);
}

TORCH_LIBRARY_IMPL(unisono, Autograd, library) {
  UNISONO_IMPLEMENT(library, derivatives);
}

}  // namespace unisono
