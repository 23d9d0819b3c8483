// The memory of one operation, made from tensors that have been checked.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <utility>
#include <vector>

#include "unisono/src/bridge.rs.h"

namespace unisono {

using Tensors = std::vector<at::Tensor>;

// Tensors that must stay alive until an operation has ended, and the copies to be made then.
struct Kept {
  Tensors tensors;
  // Where to, where from: outputs that are not contiguous are received beside and copied into
  // place.
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
};

inline constexpr Place on_host{.device = -1, .stream = 0};

// One operation: how the core is to carry it out, over which memory.
//
// Tensors are added as what they are to the operation, all of them on one device. A tensor that is
// not contiguous is replaced by a contiguous one, in the order of its elements, so that ranks with
// other strides still agree. Copies of a device's memory are made in the order of its current
// stream.
class Job {
 public:
  explicit Job(Collective collective) : collective_(collective) {}

  // All of a job's tensors have one element type and device; `argument` names the tensor in errors.
  // Of a type that has no arithmetic here (convert.hpp) they are taken as the bits they are, unless
  // the job reduces.
  void read(const at::Tensor& tensor, const char* argument);
  void write(const at::Tensor& tensor, const char* argument);
  // Read and written: the tensor's own contribution lies in it.
  void update(const at::Tensor& tensor, const char* argument);
  // The same in a copy, which is put into place at the end: for a tensor that shares memory with
  // another of the call. Each contributes what it holds now, and the last one's result stays.
  void update_beside(const at::Tensor& tensor, const char* argument);
  // At the end `to` gets what `from` has got, one of the outputs so far.
  void repeat(const at::Tensor& from, const at::Tensor& to, const char* argument);

  // If inputs and outputs share bytes, reads the inputs from a copy. With `block`: unless the input
  // is exactly the block-th piece of the output, or begins there when the output is one piece; then
  // the operation is in place.
  void part_overlap(int block = -1);
  // The outputs must be disjoint: the core writes to them at the same time.
  void check_outputs(const char* argument) const;

  // Before its tensors. `by`: a factor besides, of one element on a device. Inputs on a device are
  // multiplied there, in the order of its stream; the host reads it only for those that torch does
  // not multiply as it should.
  void op(Operator op, double factor, at::Tensor by = {}) {
    op_ = op, factor_ = factor, by_ = std::move(by);
  }
  void root(int64_t root) { root_ = root; }
  void even(int64_t count) { layout_ = Layout::Even, count_ = static_cast<size_t>(count); }
  void per_rank(std::vector<size_t> counts) {
    layout_ = Layout::PerRank, counts_ = std::move(counts);
  }
  void per_pair(std::vector<size_t> send, std::vector<size_t> recv) {
    layout_ = Layout::PerPair, counts_ = std::move(send), recv_counts_ = std::move(recv);
  }

  // From now on results that go to tensors by way of others have what those had before.
  static void keep_what_is_not_written();

  // Where its tensors lie; the CPU when it has none.
  at::Device device() const { return device_; }

  // For the record of the call (recorded.hpp).
  Collective collective() const { return collective_; }
  at::ScalarType type() const { return type_; }
  int64_t root() const { return root_; }
  const std::vector<size_t>& counts() const { return counts_; }
  const std::vector<size_t>& recv_counts() const { return recv_counts_; }
  // How many elements are read and written; a tensor that is both counts as written.
  int64_t elements_in() const { return elements(input_); }
  int64_t elements_out() const { return elements(output_); }

  // Valid while the job stays where it is.
  Call call(int64_t timeout_ms, Place place = on_host) const;
  Message message(int64_t peer, uint64_t tag, int64_t timeout_ms, Place place = on_host) const;
  Kept& kept() { return kept_; }
  const Kept& kept() const { return kept_; }

 private:
  // The tensor as the operation sees it.
  at::Tensor accept(const at::Tensor& tensor, const char* argument);
  void write_beside(const at::Tensor& tensor);
  int64_t elements(const c10::SmallVector<Piece, 2>& pieces) const;
  // Whether this tensor is to be multiplied before the operation.
  bool multiplies(const at::Tensor& tensor);
  at::Tensor multiplied(const at::Tensor& tensor) const;

  Collective collective_;
  // The element type that was given, and the one that the operation sees.
  at::ScalarType type_ = at::kByte;
  at::ScalarType seen_as_ = at::kByte;
  at::Device device_ = at::kCPU;
  bool typed_ = false;
  Operator op_ = Operator::None;
  double factor_ = 1.0;
  at::Tensor by_;
  int64_t root_ = 0;
  c10::SmallVector<Piece, 2> input_;
  c10::SmallVector<Piece, 2> output_;
  bool has_input_ = false;
  bool has_output_ = false;
  Layout layout_ = Layout::Even;
  size_t count_ = 0;
  std::vector<size_t> counts_;
  std::vector<size_t> recv_counts_;
  Kept kept_;
};

// For each tensor whether it shares bytes with another one; empty when none does. Those that are
// not contiguous are left out: an operation works on copies of them.
std::vector<bool> sharing(const Tensors& tensors);

// Refuses a tensor that this backend cannot carry: another device, another layout.
void check_tensor(const at::Tensor& tensor, const char* argument);

// Refuses tensors that are not like `first` in type, device and sizes.
void check_alike(const Tensors& tensors, const at::Tensor& first, const char* argument);

[[noreturn]] void wrong_value(const char* argument, const std::string& what);

}  // namespace unisono
