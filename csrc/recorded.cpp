#include "recorded.hpp"

#include <tuple>
#include <type_traits>
#include <utility>

namespace unisono {
namespace {

// Older versions of torch know neither the number of a call nor whether it goes on by itself.
template <typename Info>
std::shared_ptr<Info> describe(const Recorded& call) {
  const auto make = [&call](auto... more) {
    return std::make_shared<Info>(
        std::make_tuple(call.group, call.description), static_cast<int>(call.rank),
        std::string(call.name), call.elements_in, call.elements_out, call.type, call.splits_in,
        call.splits_out, static_cast<int>(call.first), static_cast<int>(call.stride),
        static_cast<int>(call.size), more...);
  };
  std::shared_ptr<Info> info;
  if constexpr (requires(const Info& one) { one.isAsynchronizedOp(); }) {
    info = make(call.async);
  } else {
    info = make();
  }
  if constexpr (requires(Info& one) { one.setSequenceInfo(int64_t{}, bool{}); }) {
    info->setSequenceInfo(call.sequence, call.is_message);
  }
  return info;
}

}  // namespace

Span::Span(const Recorded& call)
    : info_(c10::DebugInfoKind::PARAM_COMMS_INFO, describe<torch::ParamCommsDebugInfo>(call)),
      function_(at::RecordScope::FUNCTION) {
  if (!function_.isActive()) return;
  if (!function_.needsInputs()) {
    function_.before(at::kParamCommsCallName);
    return;
  }
  arguments_ = {
      std::make_tuple(call.sequence, call.is_message),
      std::make_tuple(call.group, call.description),
      call.rank,
      std::string(call.name),
      call.splits_in,
      call.splits_out,
      call.first,
      call.stride,
      call.size,
      call.async,
  };
  function_.before(at::kParamCommsCallName,
                   c10::ArrayRef<const c10::IValue>(arguments_.data(), arguments_.size()));
}

}  // namespace unisono
