#include "streams.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace unisono {
namespace {

using c10::impl::VirtualGuardImpl;

}  // namespace

Place place(const c10::Stream& stream) {
  return Place{.device = stream.device_index(),
               .stream = reinterpret_cast<size_t>(stream.native_handle())};
}

Streams::Known& Streams::known(at::Device device) {
  const auto same = [&](const Known& known) { return known.device == device; };
  const auto found = std::find_if(known_.begin(), known_.end(), same);
  if (found != known_.end()) return *found;
  return known_.emplace_back(Known{device, c10::Event(device.type()), {}, {}});
}

c10::Stream Streams::current(at::Device device) {
  {
    std::lock_guard lock(mutex_);
    known(device);
  }
  return VirtualGuardImpl(device.type()).getStream(device);
}

c10::Stream Streams::own(const c10::Stream& caller, Traffic traffic) {
  std::lock_guard lock(mutex_);
  Known& known = this->known(caller.device());
  auto stream = known.streams.find(traffic);
  if (stream == known.streams.end()) {
    // Of high priority: what waits for a transfer is more than what waits for one kernel.
    const VirtualGuardImpl guard(caller.device_type());
    stream =
        known.streams.emplace(traffic, guard.getStreamFromGlobalPool(caller.device(), true)).first;
  }
  // A wait for an event means its last record before the wait, so one event does for all calls.
  known.ready.record(caller);
  known.ready.block(stream->second);
  return stream->second;
}

void Streams::order_in_graph(const c10::Stream& stream) {
  std::lock_guard lock(mutex_);
  Known& known = this->known(stream.device());
  // Another graph's, if that stream is no longer captured; then there is nothing to come after.
  if (known.captured && *known.captured != stream && is_capturing(*known.captured)) {
    c10::Event now(stream.device_type());
    now.record(*known.captured);
    now.block(stream);
  }
  known.captured = stream;
}

void Streams::drain(const std::vector<at::Device>& more) {
  std::vector<c10::Stream> streams;
  {
    std::lock_guard lock(mutex_);
    for (const at::Device device : more) known(device);
    for (const Known& known : known_) {
      streams.push_back(VirtualGuardImpl(known.device.type()).getStream(known.device));
      const auto collectives = known.streams.find(Traffic{});
      if (collectives != known.streams.end()) streams.push_back(collectives->second);
    }
  }
  for (const c10::Stream& stream : streams) stream.synchronize();
}

}  // namespace unisono
