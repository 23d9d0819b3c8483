#include "symmetric.hpp"

#include <c10/core/CPUAllocator.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <utility>

#include "backend.hpp"
#include "convert.hpp"
#include "registry.hpp"

namespace unisono {

namespace {

namespace symmetric_memory = c10d::symmetric_memory;

// The block of a rank, as long as others may use it.
class KeptBlock final : public Keeper {
 public:
  explicit KeptBlock(std::shared_ptr<SymmetricBlock> block) : block_(std::move(block)) {}

 private:
  const std::shared_ptr<SymmetricBlock> block_;
};

// The result of a rendezvous in a group. A group that was made anew, under the same name, has
// another handle, and one with other members another generation.
struct Known {
  std::weak_ptr<Handle> handle;
  uint64_t generation;
  SymmetricAllocator::Pointer blocks;
};

struct Allocation {
  std::shared_ptr<SymmetricBlock> block;
  std::optional<std::string> group_name;
  std::map<std::string, Known> known = {};
};

struct Allocations {
  std::mutex mutex;
  std::unordered_map<void*, Allocation> all;
};

Allocations& allocations() {
  return of_this_process<Allocations>();
}

// 0 is torch's word for no limit, and here that of the group.
int64_t limit_of(size_t timeout_ms) {
  return timeout_ms == 0 ? -1 : static_cast<int64_t>(timeout_ms);
}

size_t number_of(int channel) {
  if (channel < 0) wrong_value("channel", c10::str(channel, " is no channel"));
  return static_cast<size_t>(channel);
}

}  // namespace

SymmetricBlock::SymmetricBlock(size_t bytes)
    : bytes_(bytes), address_(heap_allocate(std::max<size_t>(bytes, 1))) {
  if (address_ == nullptr) {
    C10_THROW_ERROR(OutOfMemoryError,
                    c10::str("unisono: there is no room for ", bytes,
                             " bytes in the shared heap: see UNISONO_HEAP_BYTES"));
  }
  c10::profiledCPUMemoryReporter().New(address_, bytes);
}

SymmetricBlock::~SymmetricBlock() {
  c10::profiledCPUMemoryReporter().Delete(address_);
  heap_free(static_cast<uint8_t*>(address_));
}

SymmetricBlocks::SymmetricBlocks(rust::Box<Symmetric> met, std::shared_ptr<SymmetricBlock> block,
                                 int rank, int size, const std::vector<uint64_t>& global_ranks)
    : block_(std::move(block)),
      met_(std::move(met)),
      rank_(rank),
      global_ranks_(global_ranks.begin(), global_ranks.end()) {
  for (int other = 0; other < size; ++other) {
    buffers_.push_back(reinterpret_cast<void*>(met_->start(other)));
    pads_.push_back(reinterpret_cast<void*>(met_->pad(other)));
    // A group whose members came by `reconfigure` has no list of them.
    if (global_ranks.empty()) global_ranks_.push_back(other);
  }
}

void SymmetricBlocks::check_rank(int rank, const char* argument) const {
  if (rank < 0 || rank >= static_cast<int>(buffers_.size())) {
    wrong_value(argument, c10::str("rank ", rank, " is out of range: the group has ",
                                   buffers_.size(), " ranks"));
  }
}

void SymmetricBlocks::barrier(int channel, size_t timeout_ms) {
  raise(met_->barrier(number_of(channel), limit_of(timeout_ms)));
}

void SymmetricBlocks::put_signal(int dst_rank, int channel, size_t timeout_ms) {
  check_rank(dst_rank, "dst_rank");
  raise(met_->put_signal(dst_rank, number_of(channel), limit_of(timeout_ms)));
}

void SymmetricBlocks::wait_signal(int src_rank, int channel, size_t timeout_ms) {
  check_rank(src_rank, "src_rank");
  raise(met_->wait_signal(src_rank, number_of(channel), limit_of(timeout_ms)));
}

void* SymmetricAllocator::alloc(size_t size, int /*device_idx*/,
                                const std::optional<std::string>& group_name) {
  auto block = std::make_shared<SymmetricBlock>(size);
  void* const address = block->address();
  std::lock_guard lock(allocations().mutex);
  allocations().all.insert_or_assign(
      address, Allocation{.block = std::move(block), .group_name = group_name});
  return address;
}

// The block of a forked child's parent is not known to the child, and stays as it is.
void SymmetricAllocator::free(void* ptr) {
  decltype(allocations().all)::node_type freed;
  {
    std::lock_guard lock(allocations().mutex);
    freed = allocations().all.extract(ptr);
  }
  // Without the lock: it closes windows.
}

size_t SymmetricAllocator::get_alloc_size(void* ptr) {
  std::lock_guard lock(allocations().mutex);
  const auto found = allocations().all.find(ptr);
  return found == allocations().all.end() ? 0 : found->second.block->bytes();
}

bool SymmetricAllocator::has_allocation(void* ptr) {
  std::lock_guard lock(allocations().mutex);
  return allocations().all.contains(ptr);
}

SymmetricAllocator::Pointer SymmetricAllocator::rendezvous(
    void* ptr, const std::optional<std::string>& group_name) {
  std::shared_ptr<SymmetricBlock> block;
  std::optional<std::string> name = group_name;
  {
    std::lock_guard lock(allocations().mutex);
    const auto found = allocations().all.find(ptr);
    if (found == allocations().all.end()) {
      wrong_value("tensor",
                  "its memory is not symmetric: make it by "
                  "torch.distributed._symmetric_memory.empty(..., device=\"cpu\")");
    }
    block = found->second.block;
    if (!name) name = found->second.group_name;
  }
  if (!name) wrong_value("group", "it is needed: neither this call nor the tensor names one");
  auto* const backend = backend_of(c10d::resolve_process_group(*name));
  if (backend == nullptr) {
    wrong_value("group", c10::str("the group \"", *name, "\" is not served by unisono"));
  }
  const auto& handle = backend->handle();
  const uint64_t generation = handle->generation();
  {
    std::lock_guard lock(allocations().mutex);
    auto& known = allocations().all.at(ptr).known;
    const auto found = known.find(*name);
    if (found != known.end() && found->second.handle.lock() == handle &&
        found->second.generation == generation) {
      return found->second.blocks;
    }
  }
  Met met =
      unisono::rendezvous(*handle->group, block->piece(), symmetric_memory::get_signal_pad_size(),
                          std::make_unique<KeptBlock>(block));
  raise(met.status);
  auto blocks = c10::make_intrusive<SymmetricBlocks>(
      std::move(met.symmetric), std::move(block), backend->getRank(), backend->getSize(),
      backend->getBackendOptions()->global_ranks_in_group);
  Pointer before;
  std::lock_guard lock(allocations().mutex);
  auto& known = allocations().all.at(ptr).known[*name];
  before = std::exchange(known, Known{handle, generation, blocks}).blocks;
  return blocks;
}

void serve_symmetric_memory() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Never destroyed: tensors of it may live until the process ends.
    const auto& allocator = *new c10::intrusive_ptr<symmetric_memory::SymmetricMemoryAllocator>(
        c10::make_intrusive<SymmetricAllocator>());
    symmetric_memory::register_availability(allocator->name(), allocator);
    if (!symmetric_memory::has_allocator(c10::kCPU)) {
      symmetric_memory::register_allocator(c10::kCPU, allocator);
    }
  });
}

}  // namespace unisono
