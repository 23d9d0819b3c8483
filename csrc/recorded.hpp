// The record of a call in torch's profiler by which readers of its traces know collectives.
//
// It is a span named `record_param_comms`, with the group, the counts of elements, their type and
// the ranks as arguments: what NCCL's process group makes of its calls. Of a call that blocks it
// has the whole duration; of one that goes on in the background the start alone, and the span with
// the operation's name (`unisono:all_reduce`) the duration.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <vector>

namespace unisono {

// A call in the words of the record.
struct Recorded {
  const char* name;
  // As NCCL's process group has it: the root of a collective that has one, of a message the peer,
  // of others this rank.
  int64_t rank;
  int64_t elements_in;
  int64_t elements_out;
  at::ScalarType type;
  std::vector<int64_t> splits_in = {};
  std::vector<int64_t> splits_out = {};
  bool async = false;
  bool is_message = false;
  // Its number in the group, where that is known before.
  int64_t sequence = -1;
  // The group: its name, its description, its size, and its ranks in the whole job, where they are
  // equally far apart; otherwise the stride is -1.
  std::string group = {};
  std::string description = {};
  int64_t size = 0;
  int64_t first = 0;
  int64_t stride = 1;
};

// The span, from its making to its end, both in one thread.
class Span {
 public:
  explicit Span(const Recorded& call);

 private:
  const c10::DebugInfoGuard info_;
  std::vector<c10::IValue> arguments_;
  at::RecordFunction function_;
};

}  // namespace unisono
