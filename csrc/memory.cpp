// Memory for communication: blocks of the shared heap, which peers on the host read in place.
//
// DDP asks its backend for the memory of its buckets, and FSDP2 for that of its collectives when
// told to (set_allocate_memory_from_process_group_for_comm). A tensor from here is like any other:
// it may outlive the group, be resized and be freed by any thread. Where the heap has no room its
// memory is torch's.
//
// The same of devices: there torch's caching allocator hands out parts of memory that peers read in
// place (python/unisono/_torch_memory.py).
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "backend.hpp"

namespace unisono {

namespace {

// Frees what HeapAllocator allocated, whichever memory it was.
void free_block(void* address) {
  if (heap_free(static_cast<uint8_t*>(address))) {
    c10::profiledCPUMemoryReporter().Delete(address);
  } else {
    c10::GetDefaultCPUAllocator()->raw_deallocate(address);
  }
}

class HeapAllocator final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    void* address = bytes == 0 ? nullptr : heap_allocate(bytes);
    if (address != nullptr) {
      c10::profiledCPUMemoryReporter().New(address, bytes);
    } else if (bytes != 0) {
      address = c10::GetDefaultCPUAllocator()->raw_allocate(bytes);
    }
    return {address, address, &free_block, at::kCPU};
  }

  // Context and data are the same, so that raw_allocate works too.
  at::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

// Never destroyed: tensors of it may live until the process ends.
HeapAllocator& heap_allocator() {
  static auto* allocator = new HeapAllocator;
  return *allocator;
}

// The operator that allocates memory of devices, if Python has defined one.
std::optional<c10::OperatorHandle> device_allocator() {
  static const auto found = c10::Dispatcher::singleton().findSchema({"unisono::allocate", ""});
  const auto key = c10::DispatchKey::CompositeExplicitAutograd;
  return found && found->hasKernelForDispatchKey(key) ? found : std::nullopt;
}

}  // namespace

bool Backend::supportsTensorAlloc(c10::DeviceIndex index) {
  // The CPU is the device without an index.
  if (index < 0) return getSize() > 1 && heap_enabled();
  return at::hasCUDA() && handle_->group->reads_devices_in_place() &&
         device_allocator().has_value();
}

std::shared_ptr<c10::Allocator> Backend::getMemAllocator() {
  return {&heap_allocator(), [](c10::Allocator*) {}};
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  // DDP (torch 2.11 to 2.15) works on complex gradients as the reals that they are made of. It
  // views a bucket of its own as these, and one of its backend's it takes as it is: for real.
  // Python, where others ask for memory, makes complex numbers of it again (_torch_memory.py).
  if (at::isComplexType(dtype)) {
    return allocateTensor(2 * size, options.dtype(c10::toRealValueType(dtype)));
  }
  const bool plain =
      options.layout() == at::kStrided && !options.pinned_memory() && !options.has_memory_format();
  // A dispatch mode, such as that of fake tensors, has its own idea of what at::empty returns.
  if (!plain || c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    return at::empty({size}, options);
  }
  if (const auto allocator = device_allocator(); allocator && options.device().is_cuda()) {
    using Allocate = at::Tensor(int64_t, at::ScalarType, at::Device);
    return allocator->typed<Allocate>()
        .call(size, dtype, options.device())
        .set_requires_grad(options.requires_grad());
  }
  if (!options.device().is_cpu()) return at::empty({size}, options);
  at::Tensor tensor = at::detail::empty_generic(
      {size}, &heap_allocator(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, std::nullopt);
  return tensor.set_requires_grad(options.requires_grad());
}

}  // namespace unisono
