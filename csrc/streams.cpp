#include "streams.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "buffers.hpp"
#include "convert.hpp"

namespace unisono {
namespace {

using c10::impl::VirtualGuardImpl;

rust::Box<OwnStream> lease(at::Device device) {
  Lent lent = lend_stream(device.index());
  raise(lent.status);
  return std::move(lent.stream);
}

}  // namespace

bool is_there(at::Device device) {
  return device.is_cuda() && device.has_index() && c10::impl::hasDeviceGuardImpl(at::kCUDA) &&
         check_device(device.index()).code == 0;
}

Place place(const c10::Stream& stream) {
  return Place{.device = stream.device_index(),
               .stream = reinterpret_cast<size_t>(stream.native_handle())};
}

OwnedStream::OwnedStream(at::Device device)
    : lease_(lease(device)),
      // torch's id of a stream that it has not made is the stream's handle.
      stream_(c10::Stream::UNSAFE, device, static_cast<c10::StreamId>(lease_->handle())) {
  TORCH_CHECK(
      reinterpret_cast<size_t>(stream_.native_handle()) == lease_->handle(),
      "unisono: this version of torch takes the handle of a CUDA stream for something else; "
      "use one that unisono supports");
}

Streams::Known& Streams::known(at::Device device) {
  const auto same = [&](const Known& known) { return known.device == device; };
  const auto found = std::find_if(known_.begin(), known_.end(), same);
  if (found != known_.end()) return *found;
  raise(check_device(device.index()));
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
  auto found = known.streams.find(traffic);
  if (found == known.streams.end()) {
    found = known.streams.emplace(traffic, caller.device()).first;
  }
  const c10::Stream& stream = found->second.get();
  // A wait for an event means its last record before the wait, so one event does for all calls.
  known.ready.record(caller);
  known.ready.block(stream);
  return stream;
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

void Streams::note_in_graph(const c10::Stream& stream) {
  std::lock_guard lock(mutex_);
  Known& known = this->known(stream.device());
  if (!known.captured || !is_capturing(*known.captured)) known.captured = stream;
}

void Streams::drain(const std::vector<at::Device>& more) {
  std::vector<c10::Stream> streams;
  {
    std::lock_guard lock(mutex_);
    for (const at::Device device : more) known(device);
    for (const Known& known : known_) {
      streams.push_back(VirtualGuardImpl(known.device.type()).getStream(known.device));
      const auto collectives = known.streams.find(Traffic{});
      if (collectives != known.streams.end()) streams.push_back(collectives->second.get());
    }
  }
  for (const c10::Stream& stream : streams) {
    if (!is_capturing(stream)) continue;
    wrong_value("barrier",
                c10::str("it waits for the streams of ", stream.device(),
                         ", and what is put into them now becomes part of a graph; call it before "
                         "the capture begins or after its end"));
  }
  for (const c10::Stream& stream : streams) stream.synchronize();
}

bool Streams::in_capture() {
  std::lock_guard lock(mutex_);
  return std::any_of(known_.begin(), known_.end(), [](const Known& known) {
    return known.captured && is_capturing(*known.captured);
  });
}

}  // namespace unisono
