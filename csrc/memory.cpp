// Memory for communication: blocks of the shared heap, which peers on the host read in place.
//
// DDP asks its backend for the memory of its buckets, and FSDP2 for that of its collectives when
// told to (set_allocate_memory_from_process_group_for_comm). A tensor from here is like any other:
// it may outlive the group, be resized and be freed by any thread. Where the heap has no room its
// memory is torch's.
#include <ATen/EmptyTensor.h>
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

}  // namespace

bool Backend::supportsTensorAlloc(c10::DeviceIndex index) {
  // The CPU is the device without an index.
  return index < 0 && getSize() > 1 && heap_enabled();
}

std::shared_ptr<c10::Allocator> Backend::getMemAllocator() {
  return {&heap_allocator(), [](c10::Allocator*) {}};
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  const bool plain = options.device().is_cpu() && options.layout() == at::kStrided &&
                     !options.pinned_memory() && !options.has_memory_format();
  // A dispatch mode, such as that of fake tensors, has its own idea of what at::empty returns.
  if (!plain || c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    return at::empty({size}, options);
  }
  at::Tensor tensor = at::detail::empty_generic(
      {size}, &heap_allocator(), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::typeMetaToScalarType(options.dtype()), std::nullopt);
  return tensor.set_requires_grad(options.requires_grad());
}

}  // namespace unisono
