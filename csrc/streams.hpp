// The streams on which a backend's calls on device memory run.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "unisono/src/bridge.rs.h"

namespace unisono {

// The traffic of a stream. Collectives happen in one order on every rank and share a stream. A
// message holds up the work behind it until its other side has come, so messages of each direction
// and peer have a stream of their own: a receive that waits must not hold up the send that its peer
// waits for.
struct Traffic {
  enum class Kind : uint8_t { Collectives, Send, Receive };

  Kind kind = Kind::Collectives;
  // The other rank of messages; below 0 for any.
  int64_t peer = 0;

  auto operator<=>(const Traffic&) const = default;
};

// A stream that the core lends to one owner: not one of torch's pool, which gives the same ones to
// many. It goes back when this does, whatever is still in it, and is never destroyed: allocators
// may know it for as long as a tensor lives that was used in it.
class OwnedStream {
 public:
  explicit OwnedStream(at::Device device);

  const c10::Stream& get() const { return stream_; }

 private:
  rust::Box<OwnStream> lease_;
  c10::Stream stream_;
};

// The streams of one backend. A call that its caller waits for runs on the stream that is current,
// an asynchronous one on a stream that is the backend's own. Known to c10 alone, whose guard for
// the device type stands between us and CUDA: nothing here needs CUDA's headers or libraries.
class Streams {
 public:
  // The stream that is current on the device, which from now on counts as used. Refused for one
  // that is not there: every later barrier would wait for it.
  c10::Stream current(at::Device device);
  // The backend's own stream. Work put into it from here on comes after the work in `caller` now.
  c10::Stream own(const c10::Stream& caller, Traffic traffic);

  // Has a collective on `stream`, which is being captured, come after the group's last one in the
  // graph. The core orders collectives on several streams by what has happened; in a graph nothing
  // has, and two of one group at the same time would wait for each other.
  void order_in_graph(const c10::Stream& stream);

  // A message is being captured in `stream`. Messages come after nothing but what is there.
  void note_in_graph(const c10::Stream& stream);

  // Blocks until what is in the current stream of each device in use and in the own stream of its
  // collectives has ended. `more` are devices that count as used from now on. Not messages: one
  // that waits may be what a peer sends only later. Refused while one of them is being captured,
  // which to wait for would spoil the capture.
  void drain(const std::vector<at::Device>& more);

  // Whether a graph is being captured that contains a call of the group.
  bool in_capture();

 private:
  struct Known {
    at::Device device;
    // Recorded in the caller's stream, again and again.
    c10::Event ready;
    std::map<Traffic, OwnedStream> streams;
    // Where the last collective that became part of a graph was put, or a message came from.
    std::optional<c10::Stream> captured;
  };

  // With the lock held.
  Known& known(at::Device device);

  std::mutex mutex_;
  std::vector<Known> known_;
};

// Whether there is such a CUDA device. The driver tells, not torch's guard for the device type:
// FakeTensorMode, on a host without a GPU, registers one that counts eight devices, whose streams
// have no handles.
bool is_there(at::Device device);

// A stream as the core knows it.
Place place(const c10::Stream& stream);

// Whether what is put into the stream now is recorded in a graph. The core tells: not every version
// of torch can.
inline bool is_capturing(const c10::Stream& stream) {
  return is_capturing(place(stream));
}

}  // namespace unisono
