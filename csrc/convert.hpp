// torch's words in unisono's: element types, operators, time limits, errors.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "python_error.hpp"
#include "unisono/src/bridge.rs.h"

namespace unisono {

// The core's type of these elements, if it has arithmetic for them.
inline std::optional<DataType> known_type(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return DataType::Float16;
    case at::kBFloat16:
      return DataType::BFloat16;
    case at::kFloat:
      return DataType::Float32;
    case at::kDouble:
      return DataType::Float64;
    case at::kFloat8_e4m3fn:
      return DataType::Float8E4M3;
    case at::kFloat8_e5m2:
      return DataType::Float8E5M2;
    case at::kChar:
      return DataType::Int8;
    case at::kShort:
      return DataType::Int16;
    case at::kInt:
      return DataType::Int32;
    case at::kLong:
      return DataType::Int64;
    case at::kByte:
      return DataType::UInt8;
    case at::kUInt16:
      return DataType::UInt16;
    case at::kUInt32:
      return DataType::UInt32;
    case at::kUInt64:
      return DataType::UInt64;
    case at::kBool:
      return DataType::Bool;
    case at::kComplexFloat:
      return DataType::Complex64;
    case at::kComplexDouble:
      return DataType::Complex128;
    default:
      return std::nullopt;
  }
}

inline DataType data_type(at::ScalarType type) {
  const auto known = known_type(type);
  if (known) return *known;
  C10_THROW_ERROR(TypeError,
                  c10::str("unisono moves tensors of type ", c10::toString(type),
                           " but does not reduce them; convert them to a type that it reduces, "
                           "such as float32"));
}

// The type by which a tensor is moved: its own, or one of the size of its elements if no more is
// known of them, as of the floats of 8 bits and fewer that are scales of others, of what is smaller
// than a byte, of halves of complex numbers.
inline at::ScalarType moved_type(at::ScalarType type) {
  if (known_type(type)) return type;
  if (c10::isQIntType(type)) {
    C10_THROW_ERROR(TypeError, c10::str("unisono carries no tensors of type ", c10::toString(type),
                                        ", whose scales lie beside their elements; send int_repr() "
                                        "of them and the scales"));
  }
  switch (c10::elementSize(type)) {
    case 1:
      return at::kByte;
    case 2:
      return at::kUInt16;
    case 4:
      return at::kUInt32;
    default:
      C10_THROW_ERROR(TypeError, c10::str("unisono carries no tensors of type ",
                                          c10::toString(type), "; view them as bytes"));
  }
}

// An operator and, for a premultiplied sum, its factor.
struct Reduction {
  Operator op = Operator::None;
  double factor = 1.0;
  // A factor that lies on a device, which the host does not know.
  at::Tensor by = {};
};

inline Reduction reduction(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return {Operator::Sum};
    case c10d::ReduceOp::AVG:
      return {Operator::Avg};
    case c10d::ReduceOp::PRODUCT:
      return {Operator::Prod};
    case c10d::ReduceOp::MIN:
      return {Operator::Min};
    case c10d::ReduceOp::MAX:
      return {Operator::Max};
    case c10d::ReduceOp::BAND:
      return {Operator::Band};
    case c10d::ReduceOp::BOR:
      return {Operator::Bor};
    case c10d::ReduceOp::BXOR:
      return {Operator::Bxor};
    case c10d::ReduceOp::PREMUL_SUM: {
      // torch makes this operator with this supplement and no other; the older name exists in every
      // version.
      const auto* factor = static_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (factor == nullptr) break;
      if (!factor->tensor_factor.defined()) return {Operator::PremulSum, factor->double_factor};
      if (factor->tensor_factor.is_cuda()) {
        return {Operator::PremulSum, 1.0, factor->tensor_factor};
      }
      return {Operator::PremulSum, factor->tensor_factor.item<double>()};
    }
    default:
      break;
  }
  C10_THROW_ERROR(ValueError,
                  c10::str("op: reduce operator number ", static_cast<int>(op.op_), " is unknown"));
}

// A limit for the core: below 0 means the group's own.
inline int64_t milliseconds(std::chrono::milliseconds timeout) {
  return timeout == c10d::kUnsetTimeout ? -1 : std::max<int64_t>(timeout.count(), 0);
}

// The exception that a signal handler has raised in a wait of this thread; null where it was taken
// before.
inline std::exception_ptr interruption() {
  Raised raised = take_raised();
  if (raised.class_ == 0) return nullptr;
  try {
    throw python_error(std::move(raised));
  } catch (...) {
    return std::current_exception();
  }
}

// The exception for a failure. A wrong argument is a ValueError; what the network or another
// process did is a DistNetworkError; the rest, timeouts among them, is a DistBackendError. All but
// the first are RuntimeErrors. An exception that a signal handler has raised in a wait stays as it
// is.
inline std::exception_ptr exception(const Status& status) {
  if (static_cast<Code>(status.code) == Code::Interrupted) {
    if (auto raised = interruption()) return raised;
  }
  const c10::SourceLocation here{"unisono", __FILE__, __LINE__};
  const auto text = "unisono: " + std::string(status.message);
  switch (static_cast<Code>(status.code)) {
    case Code::InvalidArgument:
    case Code::Unsupported:
      return std::make_exception_ptr(c10::ValueError(here, text));
    case Code::PeerLost:
    case Code::System:
      return std::make_exception_ptr(c10::DistNetworkError(here, text));
    case Code::Timeout:
      return std::make_exception_ptr(c10::DistBackendError(
          here, "unisono: Timed out waiting: " + std::string(status.message)));
    default:
      return std::make_exception_ptr(c10::DistBackendError(here, text));
  }
}

// When an error of unisono's was last raised in this process.
inline std::atomic<std::chrono::steady_clock::rep> last_raised = 0;

[[noreturn]] inline void raise(const std::exception_ptr& error) {
  last_raised = std::chrono::steady_clock::now().time_since_epoch().count();
  std::rethrow_exception(error);
}

// Throws unless `status` is success.
inline void raise(const Status& status) {
  if (status.code != 0) raise(exception(status));
}

inline rust::Str str(const std::string& text) {
  return rust::Str(text.data(), text.size());
}

}  // namespace unisono
