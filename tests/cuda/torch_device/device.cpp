// CUDA tensors on an emulated driver, for tests of the backend on machines without a GPU.
//
// torch's own code for CUDA needs the runtime library, which asks the driver for more than an
// emulation has. So this takes the place of c10's guard for the device type: its streams and events
// are the driver's. Memory comes from a small cache that, like torch's, gives a freed block out
// again at once. Of torch's operators there are those that the backend itself uses: empty, copy and
// views. `torch.ops.emulated` is what tests call.
#include <ATen/ATen.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "driver.hpp"

namespace emulated {
namespace {

constexpr int kPool = 32;
constexpr size_t kSlab = size_t{64} << 20;

// The streams that the driver made for one device, on behalf of torch.
struct Streams {
  std::vector<StreamHandle> handles = {nullptr};
  // Those of the pool are 1 to kPool, and given out in turn; new ones come after them.
  int next = 0;
};

// As torch has them: 0 is the default stream, an odd number one of ours, and an even one the handle
// of a stream that other code has made.
int64_t id_of(size_t index) {
  return index == 0 ? 0 : static_cast<int64_t>(2 * index + 1);
}

struct World {
  std::mutex mutex;
  std::vector<void*> contexts;
  std::vector<Streams> streams;
  // The rest of the last large piece of each device: from, to.
  std::map<int, std::pair<Pointer, Pointer>> slabs;
  std::vector<Pointer> pieces;
  // Free blocks by device and size, and all that were ever made with their sizes.
  std::map<std::pair<int, size_t>, std::vector<Pointer>> free;
  std::unordered_map<Pointer, std::pair<int, size_t>> blocks;
  // Streams that use a block beside the one it came from, and freed blocks that wait for them.
  std::unordered_map<Pointer, std::set<StreamHandle>> users;
  std::vector<std::pair<Pointer, std::vector<EventHandle>>> deferred;
  std::vector<at::Tensor> staging;
  std::vector<uint32_t*> gates;
  std::vector<void*> graphs;
  bool has_ended = false;
};

thread_local int current_device = 0;
thread_local std::map<int, int64_t> current_streams;

c10::Device cuda(int64_t index) {
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

StreamHandle new_stream(int priority) {
  StreamHandle handle = nullptr;
  call("cuStreamCreateWithPriority", &handle, kNonBlocking, priority);
  return handle;
}

World& world() {
  static World* world = [] {
    auto* made = new World;
    call("cuInit", 0u);
    int count = 0;
    call("cuDeviceGetCount", &count);
    for (int device = 0; device < count; ++device) {
      void* context = nullptr;
      call("cuDevicePrimaryCtxRetain", &context, device);
      made->contexts.push_back(context);
      made->streams.emplace_back();
      call("cuCtxSetCurrent", context);
      for (int i = 0; i < kPool; ++i) made->streams.back().handles.push_back(new_stream(-1));
    }
    return made;
  }();
  return *world;
}

// Makes the driver's calls of this thread go to the device.
void enter(int device) {
  TORCH_CHECK(device >= 0 && device < static_cast<int>(world().contexts.size()),
              "there is no emulated device ", device);
  call("cuCtxSetCurrent", world().contexts[device]);
}

StreamHandle handle_of(const c10::Stream& stream) {
  enter(stream.device_index());
  const int64_t id = stream.id();
  if (id != 0 && id % 2 == 0) return reinterpret_cast<StreamHandle>(id);
  std::lock_guard lock(world().mutex);
  return world().streams[stream.device_index()].handles.at(id / 2);
}

c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), id);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, c10::DeviceIndex(current_device)}; }
  void setDevice(c10::Device device) const override {
    enter(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(world().contexts.size());
  }

  c10::Stream getStream(c10::Device device) const override {
    const auto found = current_streams.find(device.index());
    return stream_of(device.index(), found == current_streams.end() ? 0 : found->second);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.index(), 0);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    enter(device.index());
    std::lock_guard lock(world().mutex);
    auto& handles = world().streams[device.index()].handles;
    handles.push_back(new_stream(priority));
    return stream_of(device.index(), id_of(handles.size() - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    std::lock_guard lock(world().mutex);
    return stream_of(device.index(), id_of(1 + world().streams[device.index()].next++ % kPool));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(c10::Stream stream) const override { return handle_of(stream); }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    status_of("cuEventDestroy_v2", event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag flag) const override {
    const StreamHandle handle = handle_of(stream);
    if (*event == nullptr) {
      call("cuEventCreate", event, flag == c10::EventFlag::BACKEND_DEFAULT ? 0u : kDisableTiming);
    }
    call("cuEventRecord", *event, handle);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) call("cuStreamWaitEvent", handle_of(stream), event, 0u);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || is_ready("cuEventQuery", event);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) call("cuEventSynchronize", event);
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    float milliseconds = 0;
    call("cuEventElapsedTime", &milliseconds, begin, end);
    return milliseconds;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return is_ready("cuStreamQuery", handle_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    call("cuStreamSynchronize", handle_of(stream));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const StreamHandle handle = handle_of(stream);
    std::lock_guard lock(world().mutex);
    world().users[reinterpret_cast<Pointer>(data.get())].insert(handle);
  }
  // An override where torch asks, and an unused function where it does not.
  virtual bool isStreamCapturing(const c10::Stream& stream) const {
    int capturing = 0;
    call("cuStreamIsCapturing", handle_of(stream), &capturing);
    return capturing != 0;
  }

 private:
  static bool is_ready(const char* query, void* handle) {
    const int status = status_of(query, handle);
    TORCH_CHECK(status == 0 || status == kNotReady, query, " failed with ", status);
    return status == 0;
  }
};

StreamHandle current_handle(c10::Device device) {
  return handle_of(Guard().getStream(device));
}

// Memory

// With the lock held.
void free_block(Pointer block) {
  world().free[world().blocks.at(block)].push_back(block);
}

void free_deferred() {
  std::erase_if(world().deferred, [](const auto& entry) {
    for (const EventHandle event : entry.second) {
      if (status_of("cuEventQuery", event) != 0) return false;
    }
    for (const EventHandle event : entry.second) call("cuEventDestroy_v2", event);
    free_block(entry.first);
    return true;
  });
}

void give_back(void* address) {
  const auto block = reinterpret_cast<Pointer>(address);
  std::lock_guard lock(world().mutex);
  if (world().has_ended) return;
  const auto users = world().users.find(block);
  if (users == world().users.end()) return free_block(block);
  enter(world().blocks.at(block).first);
  std::vector<EventHandle> events;
  for (const StreamHandle stream : users->second) {
    EventHandle event = nullptr;
    call("cuEventCreate", &event, kDisableTiming);
    call("cuEventRecord", event, stream);
    events.push_back(event);
  }
  world().users.erase(users);
  world().deferred.emplace_back(block, std::move(events));
}

class Cache final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(current_device));
    if (bytes == 0) return {nullptr, device};
    const size_t rounded = (bytes + 511) / 512 * 512;
    enter(current_device);
    std::lock_guard lock(world().mutex);
    free_deferred();
    auto& free = world().free[{current_device, rounded}];
    Pointer block = 0;
    if (free.empty()) {
      block = cut(rounded);
      world().blocks[block] = {current_device, rounded};
    } else {
      block = free.back();
      free.pop_back();
    }
    void* address = reinterpret_cast<void*>(block);
    return {address, address, &give_back, device};
  }
  // From a large piece of the device's memory, since asking the driver may wait for the device.
  static Pointer cut(size_t bytes) {
    auto& [next, end] = world().slabs[current_device];
    if (end - next < bytes) {
      const size_t size = std::max(kSlab, bytes);
      call("cuMemAlloc_v2", &next, size);
      end = next + size;
      world().pieces.push_back(next);
    }
    const Pointer block = next;
    next += bytes;
    return block;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void*, const void*, std::size_t) const override { TORCH_CHECK(false, "not here"); }
};

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  static Cache cache;
  const c10::DeviceGuard guard(device.value_or(Guard().getDevice()));
  return at::detail::empty_strided_generic(size, stride, &cache,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           dtype.value_or(at::kFloat));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device> device,
                 std::optional<bool> pinned, std::optional<at::MemoryFormat>) {
  return empty_strided(size, c10::contiguous_strides(size), dtype, layout, device, pinned);
}

// Visits the addresses of the elements of two tensors of one shape, in the order of the elements.
template <typename Visit>
void for_each_pair(const at::Tensor& a, const at::Tensor& b, const Visit& visit) {
  std::vector<int64_t> at(a.dim(), 0);
  for (int64_t i = 0; i < a.numel(); ++i) {
    int64_t rest = i, left = 0, right = 0;
    for (int64_t d = a.dim() - 1; d >= 0; --d) {
      left += rest % a.size(d) * a.stride(d);
      right += rest % a.size(d) * b.stride(d);
      rest /= a.size(d);
    }
    visit(reinterpret_cast<Pointer>(a.const_data_ptr()) + left * a.element_size(),
          reinterpret_cast<Pointer>(b.const_data_ptr()) + right * b.element_size());
  }
}

// On the device's current stream, element by element unless both are contiguous.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  TORCH_CHECK(self.is_cuda() && source.is_cuda() && self.dtype() == source.dtype() &&
                  self.sizes() == source.sizes(),
              "the emulated device only copies between its own tensors of one type and shape");
  const StreamHandle stream = current_handle(self.device());
  const auto copy = [&](Pointer to, Pointer from, size_t bytes) {
    call("cuMemcpyDtoDAsync_v2", to, from, bytes, stream);
  };
  if (self.numel() == 0) return self;
  if (self.is_contiguous() && source.is_contiguous()) {
    copy(reinterpret_cast<Pointer>(self.data_ptr()),
         reinterpret_cast<Pointer>(source.const_data_ptr()), self.nbytes());
  } else {
    for_each_pair(self, source,
                  [&](Pointer to, Pointer from) { copy(to, from, self.element_size()); });
  }
  return self;
}

// The functions that tests call

void install() {
  static const auto* guard = new Guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kCUDA)].store(guard);
  world();
}

at::Tensor make(at::IntArrayRef size, at::ScalarType dtype, int64_t device) {
  return empty(size, dtype, std::nullopt, cuda(device), std::nullopt, std::nullopt);
}

// Puts a copy of `source`, of the CPU, into `target`, in the order of the current stream.
void upload(const at::Tensor& target, const at::Tensor& source) {
  TORCH_CHECK(target.is_contiguous() && target.dtype() == source.dtype() &&
              target.numel() == source.numel());
  const at::Tensor staged = source.contiguous().clone();
  const StreamHandle stream = current_handle(target.device());
  {
    std::lock_guard lock(world().mutex);
    world().staging.push_back(staged);
  }
  call("cuMemcpyHtoDAsync_v2", reinterpret_cast<Pointer>(target.data_ptr()),
       staged.const_data_ptr(), staged.nbytes(), stream);
}

// The content of `source` when the current stream has got here.
at::Tensor download(const at::Tensor& source) {
  const at::Tensor plain =
      source.is_contiguous() ? source
                             : make(source.sizes(), source.scalar_type(), source.device().index());
  if (!source.is_contiguous()) plain.copy_(source);
  const at::Tensor target = at::empty(source.sizes(), source.options().device(at::kCPU));
  const StreamHandle stream = current_handle(source.device());
  call("cuMemcpyDtoHAsync_v2", target.mutable_data_ptr(),
       reinterpret_cast<Pointer>(plain.const_data_ptr()), plain.nbytes(), stream);
  call("cuStreamSynchronize", stream);
  return target;
}

int64_t new_stream_of(int64_t device) {
  return Guard().getNewStream(cuda(device), 0).id();
}

// The next one of the pool.
int64_t pool_stream(int64_t device) {
  return Guard().getStreamFromGlobalPool(cuda(device), true).id();
}

// Makes the stream current in this thread; the one that was.
int64_t use_stream(int64_t device, int64_t id) {
  return Guard().exchangeStream(stream_of(static_cast<int>(device), id)).id();
}

int64_t current_stream(int64_t device) {
  return Guard().getStream(cuda(device)).id();
}

void synchronize(int64_t device) {
  enter(static_cast<int>(device));
  call("cuCtxSynchronize");
}

// Whether all that is in the current stream has happened.
bool is_idle(int64_t device) {
  const Guard guard;
  return guard.queryStream(guard.getStream(cuda(device)));
}

// A gate that is shut. The current stream of a device may be made to stop at it, until the host
// opens it.
int64_t new_gate() {
  auto* word = static_cast<uint32_t*>(aligned_alloc(4096, 4096));
  *word = 0;
  enter(current_device);
  call("cuMemHostRegister_v2", static_cast<void*>(word), size_t{4096}, kHostRegisterMapped);
  std::lock_guard lock(world().mutex);
  world().gates.push_back(word);
  return static_cast<int64_t>(world().gates.size()) - 1;
}

void stop_at(int64_t gate, int64_t device) {
  const StreamHandle stream = current_handle(cuda(device));
  Pointer address = 0;
  call("cuMemHostGetDevicePointer_v2", &address, static_cast<void*>(world().gates.at(gate)), 0u);
  call("cuStreamWaitValue32_v2", stream, address, uint32_t{1}, kWaitEqual);
}

void open(int64_t gate) {
  __atomic_store_n(world().gates.at(gate), 1u, __ATOMIC_SEQ_CST);
}

// Whether the block at the address has been freed, and not been given out again.
bool is_free(int64_t address) {
  std::lock_guard lock(world().mutex);
  free_deferred();
  const auto block = static_cast<Pointer>(address);
  const auto& free = world().free[world().blocks.at(block)];
  return std::find(free.begin(), free.end(), block) != free.end();
}

// Work put into the current stream becomes a graph, until the end of the capture.
void begin_capture(int64_t device) {
  call("cuStreamBeginCapture_v2", current_handle(cuda(device)), kThreadLocalCapture);
}

int64_t end_capture(int64_t device) {
  void* graph = nullptr;
  void* executable = nullptr;
  call("cuStreamEndCapture", current_handle(cuda(device)), &graph);
  call("cuGraphInstantiateWithFlags", &executable, graph, 0ull);
  call("cuGraphDestroy", graph);
  std::lock_guard lock(world().mutex);
  world().graphs.push_back(executable);
  return static_cast<int64_t>(world().graphs.size()) - 1;
}

// Runs a graph in the order of the current stream.
void replay(int64_t graph, int64_t device) {
  const auto stream = current_handle(cuda(device));
  call("cuGraphLaunch", world().graphs.at(graph), stream);
}

// Gives back to the driver all that is torch's; what is left then is unisono's. Tensors may outlive
// this, streams may not be used.
void end() {
  std::lock_guard lock(world().mutex);
  if (std::exchange(world().has_ended, true)) return;
  for (uint32_t* word : world().gates) __atomic_store_n(word, 1u, __ATOMIC_SEQ_CST);
  for (void* context : world().contexts) {
    call("cuCtxSetCurrent", context);
    call("cuCtxSynchronize");
  }
  for (const auto& [block, events] : world().deferred) {
    for (const EventHandle event : events) call("cuEventDestroy_v2", event);
  }
  for (void* graph : world().graphs) call("cuGraphExecDestroy", graph);
  for (uint32_t* word : world().gates) call("cuMemHostUnregister", static_cast<void*>(word));
  for (const Pointer piece : world().pieces) call("cuMemFree_v2", piece);
  for (const Streams& streams : world().streams) {
    for (const StreamHandle stream : streams.handles) {
      if (stream != nullptr) call("cuStreamDestroy_v2", stream);
    }
  }
}

TORCH_LIBRARY(emulated, library) {
  library.def("end() -> ()", end);
  library.def("begin_capture(int device) -> ()", begin_capture);
  library.def("end_capture(int device) -> int", end_capture);
  library.def("replay(int graph, int device) -> ()", replay);
  library.def("install() -> ()", install);
  library.def("make(int[] size, ScalarType dtype, int device) -> Tensor", make);
  library.def("upload(Tensor target, Tensor source) -> ()", upload);
  library.def("download(Tensor source) -> Tensor", download);
  library.def("new_stream(int device) -> int", new_stream_of);
  library.def("pool_stream(int device) -> int", pool_stream);
  library.def("use_stream(int device, int id) -> int", use_stream);
  library.def("current_stream(int device) -> int", current_stream);
  library.def("synchronize(int device) -> ()", synchronize);
  library.def("is_idle(int device) -> bool", is_idle);
  library.def("new_gate() -> int", new_gate);
  library.def("stop_at(int gate, int device) -> ()", stop_at);
  library.def("open(int gate) -> ()", open);
  library.def("is_free(int address) -> bool", is_free);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", TORCH_FN(at::native::view));
}

}  // namespace
}  // namespace emulated
