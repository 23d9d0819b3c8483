// Symmetric memory: tensors of the CPU that the ranks of one host use in each other's memory, by
// torch.distributed._symmetric_memory.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <unordered_map>
#include <vector>

#include "bridge.hpp"
#include "work.hpp"

namespace unisono {

// A block of the heap, which the tensor over it and the ranks that use it share.
class SymmetricBlock {
 public:
  explicit SymmetricBlock(size_t bytes);
  ~SymmetricBlock();
  SymmetricBlock(const SymmetricBlock&) = delete;
  SymmetricBlock& operator=(const SymmetricBlock&) = delete;

  void* address() const { return address_; }
  size_t bytes() const { return bytes_; }
  // Where there are none, a byte stands for them.
  Piece piece() const {
    return {.address = reinterpret_cast<uintptr_t>(address_), .bytes = std::max<size_t>(bytes_, 1)};
  }

 private:
  const size_t bytes_;
  void* address_;
};

// The blocks of all ranks of a group, one of each: the result of a rendezvous.
class SymmetricBlocks final : public c10d::symmetric_memory::SymmetricMemory {
 public:
  SymmetricBlocks(rust::Box<Symmetric> met, std::shared_ptr<SymmetricBlock> block, int rank,
                  int size, const std::vector<uint64_t>& global_ranks);

  std::vector<void*> get_buffer_ptrs() override { return buffers_; }
  std::vector<void*> get_signal_pad_ptrs() override { return pads_; }
  // The host is the device.
  void** get_buffer_ptrs_dev() override { return buffers_.data(); }
  void** get_signal_pad_ptrs_dev() override { return pads_.data(); }
  size_t get_buffer_size() override { return block_->bytes(); }
  // A handle is of a whole allocation.
  size_t get_offset() override { return 0; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }

  void barrier(int channel, size_t timeout_ms) override;
  void put_signal(int dst_rank, int channel, size_t timeout_ms) override;
  void wait_signal(int src_rank, int channel, size_t timeout_ms) override;

  int get_rank() override { return rank_; }
  int get_world_size() override { return static_cast<int>(buffers_.size()); }
  c10::Device get_device() override { return c10::kCPU; }
  const std::vector<int>& get_rank_to_global_rank() override { return global_ranks_; }
  int* get_rank_to_global_rank_dev() override { return global_ranks_.data(); }
  bool world_within_direct_access() override { return true; }

 private:
  void check_rank(int rank, const char* argument) const;

  const std::shared_ptr<SymmetricBlock> block_;
  const rust::Box<Symmetric> met_;
  const int rank_;
  std::vector<void*> buffers_;
  std::vector<void*> pads_;
  std::vector<int> global_ranks_;
};

// Hands out blocks of the heap, and has them meet.
class SymmetricAllocator final : public c10d::symmetric_memory::SymmetricMemoryAllocator {
 public:
  using Pointer = c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory>;

  void* alloc(size_t size, int device_idx, const std::optional<std::string>& group_name) override;
  void free(void* ptr) override;
  size_t get_alloc_size(void* ptr) override;
  Pointer rendezvous(void* ptr, const std::optional<std::string>& group_name) override;
  bool has_multicast_support(int /*device_idx*/) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::kCPU; }
  std::string name() override { return "unisono"; }
#if TORCH_VERSION_MINOR >= 15
  bool has_allocation(void* ptr) override;
#else
  bool has_allocation(void* ptr);
#endif
};

// Makes it torch's for the CPU, unless another one is. Once.
void serve_symmetric_memory();

}  // namespace unisono
