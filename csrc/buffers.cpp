#include "buffers.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <atomic>

#include <algorithm>

#include "convert.hpp"

namespace unisono {
namespace {

// Whether the tensor's bytes in memory are its elements in order.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

Piece piece(const at::Tensor& tensor) {
  return {reinterpret_cast<uintptr_t>(tensor.const_data_ptr()), tensor.nbytes()};
}

at::Tensor beside(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
}

at::Tensor as_bytes(const Piece& piece, at::Device device) {
  return at::for_blob(reinterpret_cast<void*>(piece.address), {static_cast<int64_t>(piece.bytes)})
      .options(at::TensorOptions(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

// Whether two pieces share a byte.
bool overlap(const Piece& a, const Piece& b) {
  return a.bytes > 0 && b.bytes > 0 && a.address < b.address + b.bytes &&
         b.address < a.address + a.bytes;
}

bool same(const Piece& a, const Piece& b) {
  return a.address == b.address && a.bytes == b.bytes;
}

rust::Slice<const Piece> slice(const c10::SmallVector<Piece, 2>& pieces) {
  return {pieces.data(), pieces.size()};
}

rust::Slice<const size_t> slice(const std::vector<size_t>& counts) {
  return {counts.data(), counts.size()};
}

}  // namespace

std::vector<bool> sharing(const Tensors& tensors) {
  if (tensors.size() < 2) return {};
  std::vector<std::pair<Piece, size_t>> sorted;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].nbytes() > 0 && is_plain(tensors[i])) sorted.emplace_back(piece(tensors[i]), i);
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const auto& a, const auto& b) { return a.first.address < b.first.address; });
  std::vector<bool> shared;
  size_t furthest = 0;  // Of those before the i-th the one that reaches furthest.
  for (size_t i = 1; i < sorted.size(); ++i) {
    if (overlap(sorted[furthest].first, sorted[i].first)) {
      shared.resize(tensors.size());
      shared[sorted[furthest].second] = shared[sorted[i].second] = true;
    }
    const auto end = [&](size_t at) { return sorted[at].first.address + sorted[at].first.bytes; };
    if (end(i) > end(furthest)) furthest = i;
  }
  return shared;
}

void wrong_value(const char* argument, const std::string& what) {
  C10_THROW_ERROR(ValueError, c10::str("unisono: ", argument, ": ", what));
}

void check_tensor(const at::Tensor& tensor, const char* argument) {
  if (!tensor.defined()) wrong_value(argument, "an undefined tensor was given");
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda()) {
    wrong_value(argument,
                c10::str("the tensor is on ", tensor.device(),
                         ", but this backend carries CPU and CUDA tensors; move it there, "
                         "or use another backend for that device"));
  }
  if (tensor.layout() != at::kStrided) {
    C10_THROW_ERROR(TypeError, c10::str("unisono: ", argument, ": the tensor has layout ",
                                        tensor.layout(), ", but must be dense"));
  }
}

void check_alike(const Tensors& tensors, const at::Tensor& first, const char* argument) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !first.defined()) {
      wrong_value(argument, "an undefined tensor was given");
    }
    if (tensor.scalar_type() != first.scalar_type() || tensor.layout() != first.layout()) {
      C10_THROW_ERROR(TypeError,
                      c10::str("unisono: ", argument, ": a tensor is of type ", tensor.toString(),
                               " where the first is of ", first.toString(),
                               "; several tensors of a rank must be of one type"));
    }
    if (tensor.device() != first.device() || !tensor.sizes().equals(first.sizes())) {
      wrong_value(argument, c10::str("a tensor of sizes ", tensor.sizes(), " on ", tensor.device(),
                                     " was given where the first has ", first.sizes(), " on ",
                                     first.device(), "; several tensors of a rank must be alike"));
    }
  }
}

at::Tensor Job::accept(const at::Tensor& tensor, const char* argument) {
  check_tensor(tensor, argument);
  if (!typed_) {
    type_ = tensor.scalar_type();
    seen_as_ = op_ == Operator::None ? moved_type(type_) : type_;
    data_type(seen_as_);  // Throws for a type that is not reduced.
    device_ = tensor.device();
    typed_ = true;
  } else if (device_ != tensor.device()) {
    wrong_value(argument, c10::str("a tensor is on ", tensor.device(), " where others are on ",
                                   device_, "; all tensors of a call must be on one device"));
  } else if (type_ != tensor.scalar_type()) {
    C10_THROW_ERROR(TypeError, c10::str("unisono: ", argument, ": a tensor has type ",
                                        tensor.scalar_type(), " where others have ", type_,
                                        "; all tensors of a call must have one type"));
  }
  return seen_as_ == type_ ? tensor : tensor.view(seen_as_);
}

bool Job::multiplies(const at::Tensor& tensor) {
  if (!by_.defined()) return false;
  const bool is_wide = at::isFloatingType(type_) && c10::elementSize(type_) > 1;
  if (by_.device() == tensor.device() && (is_wide || at::isComplexType(type_))) return true;
  factor_ *= by_.item<double>();
  by_ = at::Tensor();
  return false;
}

at::Tensor Job::multiplied(const at::Tensor& tensor) const {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor by = by_.reshape({});
  auto product = beside(tensor);
  // A product is rounded once, to the tensor's type.
  const auto wide = c10::promoteTypes(type_, by.scalar_type());
  if (wide == type_ && by.scalar_type() == type_) {
    at::mul_out(product, tensor, by);
  } else {
    product.copy_(at::mul(tensor.to(wide), by.to(wide)));
  }
  return product;
}

void Job::read(const at::Tensor& given, const char* argument) {
  const at::Tensor tensor = accept(given, argument);
  has_input_ = true;
  at::Tensor source = tensor;
  if (multiplies(tensor)) {
    source = multiplied(tensor);
  } else if (!is_plain(tensor)) {
    source = beside(tensor);
    source.copy_(tensor);
  }
  input_.push_back(piece(source));
  kept_.tensors.push_back(std::move(source));
}

void Job::write(const at::Tensor& given, const char* argument) {
  const at::Tensor tensor = accept(given, argument);
  has_output_ = true;
  if (is_plain(tensor)) {
    output_.push_back(piece(tensor));
    kept_.tensors.push_back(tensor);
  } else {
    write_beside(tensor);
  }
}

namespace {

// Whether some group has ranks that are gone, whose blocks of results nothing writes.
std::atomic<bool> has_gone = false;

}  // namespace

void Job::keep_what_is_not_written() {
  has_gone = true;
}

void Job::write_beside(const at::Tensor& tensor) {
  const auto stand_in = beside(tensor);
  if (has_gone) stand_in.copy_(tensor);
  output_.push_back(piece(stand_in));
  kept_.copies.emplace_back(tensor, stand_in);
}

void Job::update(const at::Tensor& tensor, const char* argument) {
  accept(tensor, argument);
  if (multiplies(tensor)) {
    read(tensor, argument);
    return write(tensor, argument);
  }
  const auto before = kept_.copies.size();
  write(tensor, argument);
  if (kept_.copies.size() == before) return;
  const auto& [to, stand_in] = kept_.copies.back();
  stand_in.copy_(to);
}

void Job::update_beside(const at::Tensor& tensor, const char* argument) {
  accept(tensor, argument);
  has_output_ = true;
  const bool multiplied = multiplies(tensor);
  if (multiplied) read(tensor, argument);
  write_beside(tensor);
  if (!multiplied) kept_.copies.back().second.copy_(tensor);
}

void Job::repeat(const at::Tensor& from, const at::Tensor& to, const char* argument) {
  kept_.copies.emplace_back(accept(to, argument), accept(from, argument));
}

void Job::part_overlap(int block) {
  const bool shared = std::any_of(input_.begin(), input_.end(), [&](const Piece& in) {
    return std::any_of(output_.begin(), output_.end(),
                       [&](const Piece& out) { return overlap(in, out); });
  });
  if (!shared) return;
  if (block >= 0 && input_.size() == 1) {
    const auto index = static_cast<size_t>(block);
    const Piece own = output_.size() == 1
                          ? Piece{output_[0].address + index * input_[0].bytes, input_[0].bytes}
                          : output_[index];
    if (same(input_[0], own)) {
      input_.clear();
      has_input_ = false;
      return;
    }
  }
  size_t bytes = 0;
  for (const Piece& in : input_) bytes += in.bytes;
  const auto copy =
      at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device_));
  int64_t filled = 0;
  for (const Piece& in : input_) {
    const auto length = static_cast<int64_t>(in.bytes);
    copy.narrow(0, filled, length).copy_(as_bytes(in, device_));
    filled += length;
  }
  input_.assign(1, piece(copy));
  kept_.tensors.push_back(copy);
}

void Job::check_outputs(const char* argument) const {
  if (output_.size() < 2) return;
  std::vector<Piece> sorted(output_.begin(), output_.end());
  const auto empty = [](const Piece& piece) { return piece.bytes == 0; };
  sorted.erase(std::remove_if(sorted.begin(), sorted.end(), empty), sorted.end());
  std::sort(sorted.begin(), sorted.end(),
            [](const Piece& a, const Piece& b) { return a.address < b.address; });
  for (size_t i = 1; i < sorted.size(); ++i) {
    if (overlap(sorted[i - 1], sorted[i])) wrong_value(argument, "two tensors share memory");
  }
}

int64_t Job::elements(const c10::SmallVector<Piece, 2>& pieces) const {
  size_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  return static_cast<int64_t>(bytes / c10::elementSize(type_));
}

Call Job::call(int64_t timeout_ms, Place place) const {
  return Call{.collective = collective_,
              .dtype = data_type(seen_as_),
              .op = op_,
              .factor = factor_,
              .root = static_cast<size_t>(root_),
              .input = slice(input_),
              .has_input = has_input_,
              .output = slice(output_),
              .has_output = has_output_,
              .layout = layout_,
              .count = count_,
              .counts = slice(counts_),
              .recv_counts = slice(recv_counts_),
              .timeout_ms = timeout_ms,
              .place = place};
}

Message Job::message(int64_t peer, uint64_t tag, int64_t timeout_ms, Place place) const {
  return Message{.dtype = data_type(seen_as_),
                 .pieces = slice(has_input_ ? input_ : output_),
                 .peer = peer,
                 .tag = tag,
                 .timeout_ms = timeout_ms,
                 .place = place};
}

}  // namespace unisono
