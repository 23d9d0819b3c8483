// The c10d backend "unisono".
//
// Each method checks its tensors, says which memory the core is to use and forwards. A blocking
// call (asyncOp false) is carried out in the calling thread; an asynchronous one is started with a
// completion that owns the tensors. On a device's memory both only put the call into a stream: a
// blocking one into the current stream, an asynchronous one into one of the backend's own.
//
// Where torch renamed a method (2.14: all_gather_single and others) the older name is overridden:
// it exists in every version, and the new names forward to it.
#pragma once

#include <torch/headeronly/version.h>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <unordered_map>
#include <vector>

#include "buffers.hpp"
#include "device_work.hpp"
#include "recorded.hpp"
#include "streams.hpp"
#include "work.hpp"

namespace unisono {

class Backend final : public c10d::Backend {
 public:
  using TensorLists = std::vector<Tensors>;
  using WorkPointer = c10::intrusive_ptr<c10d::Work>;

  // `settings` are what the group was made with, for groups made from it.
  Backend(rust::Box<Group> group, int rank, int size, c10::intrusive_ptr<Options> options,
          std::vector<Setting> settings);
  ~Backend() override;

  const std::string getBackendName() const override { return "unisono"; }
  // Before 2.15 torch may write the name and the timeout of a group that is split off or merged
  // into what this returns, later into a copy.
  c10::intrusive_ptr<Options> getBackendOptions() override {
#if TORCH_VERSION_MINOR >= 15
    return options_;
#else
    return c10::make_intrusive<Options>(*options_);
#endif
  }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPointer allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPointer allreduce_coalesced(Tensors& tensors,
                                  const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPointer allgather(TensorLists& outputs, Tensors& inputs,
                        const c10d::AllgatherOptions& opts) override;
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input,
                              const c10d::AllgatherOptions& opts) override;
  WorkPointer allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                  const c10d::AllgatherOptions& opts) override;
  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& opts) override;
  WorkPointer gather(TensorLists& outputs, Tensors& inputs,
                     const c10d::GatherOptions& opts) override;
  WorkPointer scatter(Tensors& outputs, TensorLists& inputs,
                      const c10d::ScatterOptions& opts) override;
  WorkPointer reduce_scatter(Tensors& outputs, TensorLists& inputs,
                             const c10d::ReduceScatterOptions& opts) override;
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& opts) override;
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& opts) override;
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input,
                            std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                            const c10d::AllToAllOptions& opts) override;
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs,
                       const c10d::AllToAllOptions& opts) override;
  WorkPointer send(Tensors& tensors, int to, int tag) override;
  WorkPointer recv(Tensors& tensors, int from, int tag) override;
  WorkPointer recvAnysource(Tensors& tensors, int tag) override;
  WorkPointer barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
#ifdef C10D_BACKEND_HAS_HOOKS
  WorkPointer gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                 const c10d::GatherOptions& opts) override;
#endif

  // Numbers start at 0 on every rank; there is nothing to agree on.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return handle_->group->sequence(); }
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // Calls in between, of the same thread, are started one by one and waited for together.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPointer endCoalescing() override;

  // Memory that peers on the host read in place (memory.cpp).
  bool supportsTensorAlloc(c10::DeviceIndex index) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;

  // A new group of some of the ranks; nothing on the others.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& opts) override;
  // The group goes on as one of those that are left, which keep their ranks. Returns these.
  std::vector<int64_t> mask(const std::vector<int64_t>& ranks_to_exclude);
  // For whom this rank has waited, as JSON.
  std::string stats() const;
  // How many take part.
  int living() const { return living_ > 0 ? living_.load() : getSize(); }
  // A new group of those that are left, after a failure too (`dist.shrink_group`).
  bool supportsShrinking() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& ranks_to_exclude,
                                           int shrink_flags,
                                           const c10::intrusive_ptr<Options>& opts) override;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  // The same object with other members, which know each other by handles.
  bool supportsReconfigure() const override { return true; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  WorkPointer reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif
#ifdef C10D_BACKEND_HAS_WINDOW
  // Memory that the ranks expose to each other (window.cpp).
  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
#endif
  // A new group of this and other ranks, which meet through `store`.
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<Options>& opts, const int& rank,
                                          const int& size) override;

  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override {
    handle_->wait_until([this] { return handle_->observers.all_ended(); });
  }
  // On the CPU works are always timed. On a device this costs events; without it a duration is the
  // host's, from the call on.
  void enableCollectivesTiming() override { timed_ = true; }
#ifdef C10D_BACKEND_HAS_HOOKS
  void registerAbortHook(int64_t hook_id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t hook_id) override;
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
  std::unordered_map<std::string, uint64_t> getMemoryStats() override;
#endif
#if TORCH_VERSION_MINOR >= 15
  bool supportsAbortHooks() const override { return true; }
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t hook_id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t hook_id) override;

  // Calls in between are not carried out; the plans they would follow are simulated.
  bool supportsTimeEstimation() const override { return true; }
  void startTimeEstimate() override;
  float endTimeEstimate() override;
#endif

  // For the operators (operators.cpp): a job in host memory, carried out in the calling thread.
  void carry_out(const Job& job) const;
  void all_reduce_int8(const at::Tensor& tensor, bool average) const;
  Job all_gather_job(const at::Tensor& output, const at::Tensor& input) const;
  Job reduce_scatter_job(const at::Tensor& output, const at::Tensor& input,
                         const c10d::ReduceOp& op) const;

  // For memory that the ranks of the group share beside its operations (symmetric.cpp).
  const std::shared_ptr<Handle>& handle() const { return handle_; }

  // Leaves the group: what is still under way here fails. Idempotent.
  void close() { handle_->close(); }

  // An observer that may hold the process group which holds this.
  void keep_until_the_end(std::shared_ptr<void> observer);

 private:
  // 0: all.
  std::atomic<int> living_ = 0;

  // How a call appears to c10d and its profiler.
  struct Label {
    c10d::OpType type;
    const char* title;
  };
  struct Mode {
    bool async;
    std::chrono::milliseconds timeout;
  };

  // The span of a call of one or several jobs for torch's profiler; null where none runs.
  std::unique_ptr<Span> span(Label label, c10::ArrayRef<Job> jobs, bool async) const;
  std::unique_ptr<Span> span(Recorded call) const;
  // Raises what a call that no work stands for has ended with; observers of works hear of it here.
  void check(const Status& status) const;

  c10::intrusive_ptr<Work> make_work(Label label, const Tensors& inputs, Tensors results,
                                     std::chrono::milliseconds timeout) const;
  // Carries the jobs out, or starts them.
  WorkPointer launch(Label label, std::vector<Job> jobs, const Tensors& inputs, Tensors results,
                     Mode mode);
  WorkPointer launch(Label label, Job job, const Tensors& inputs, Tensors results, Mode mode);
  // The work of a call that runs on a stream of `device`: the current one, or an own one for `own`.
  c10::intrusive_ptr<DeviceWork> make_work(Label label, at::Device device,
                                           std::optional<Traffic> own, const Tensors& inputs,
                                           Tensors results, std::chrono::milliseconds timeout);
  WorkPointer launch_on_device(Label label, std::vector<Job> jobs, const Tensors& inputs,
                               Tensors results, Mode mode);
  WorkPointer exchange_on_device(Label label, Job job, const at::Tensor& tensor, int64_t peer,
                                 int tag);
  // Blocks until what this rank has put into the streams of its devices has ended.
  void drain(const c10d::BarrierOptions& opts);
  WorkPointer barrier_on_device(at::Device device, const c10d::BarrierOptions& opts);
  WorkPointer exchange(Label label, const at::Tensor& tensor, int64_t peer, int tag);
  // The group is over: hooks have begun, and those who observe it go.
  void end_observation();
  // Between its start and its end the calls of one thread are gathered or estimated. Each thread
  // has its own: the calls of others go on as ever, and they may open windows too.
  struct Window {
    enum class Kind { Batch, Estimate };

    Kind kind = Kind::Batch;
    std::vector<WorkPointer> batch;
    // Operations that start at the end of the window, in this order. Receives of device memory:
    // streams share hardware queues, and one that waits must not hold up the sends that peers wait
    // for. Sends to this rank itself, whose receives may come later in the window.
    std::vector<std::function<WorkPointer()>> receives;
    std::vector<std::function<WorkPointer()>> sends_to_self;
    double estimate = 0;
  };
  // This thread's window if it is of this kind. No other thread touches what it points to.
  Window* window(Window::Kind kind);
  void open(Window::Kind kind);
  Window close(Window::Kind kind, const char* call);
  // Adds the work to the batch, if one is open; what the caller gets of it.
  WorkPointer started(WorkPointer work, bool async);
  // Adds to the estimate; what the caller of the call gets.
  WorkPointer estimated(Window& window, double microseconds) const;
  // Carries a job out here and now, for operations of several steps.
  void run_here(const Job& job, std::chrono::milliseconds timeout) const;

  Job all_gather_job(const Tensors& outputs, const at::Tensor& input) const;
  std::vector<Job> all_reduce_jobs(const Tensors& tensors, const c10d::ReduceOp& op) const;
  at::Tensor sum_sparse(const at::Tensor& tensor, std::chrono::milliseconds timeout) const;

  // Several tensors for each rank (several.cpp).
  at::Tensor reduced_here(const Tensors& tensors, const c10d::ReduceOp& op) const;
  Job all_reduce_several_job(const Tensors& tensors, const c10d::ReduceOp& op) const;
  Job all_gather_several_job(const TensorLists& outputs, const Tensors& inputs) const;
  const at::Tensor& root_tensor(const Tensors& tensors, int64_t index) const;
  // At the end all of the tensors are what the one at `index`, an output of the job, is.
  void repeat_in_others(Job& job, const Tensors& tensors, int64_t index) const;

  const at::Tensor& only(const Tensors& tensors, const char* argument) const;
  const Tensors& only(const TensorLists& lists, const char* argument) const;
  void check_length(size_t length, const char* argument) const;
  void check_rank(int64_t rank, const char* argument) const;

  const std::shared_ptr<Handle> handle_;
  const c10::intrusive_ptr<Options> options_;
  const std::vector<Setting> settings_;

  Streams streams_;
  std::atomic<bool> timed_ = false;

  // A byte of the device that the group is bound to, which barriers reduce.
  std::mutex token_mutex_;
  at::Tensor token_;

  std::mutex observers_mutex_;
  std::vector<std::shared_ptr<void>> observers_;

  // How often each list of ranks under each name has been split off, and what merges have made that
  // is still alive, through which store and as which rank.
  struct Merged {
    c10::weak_intrusive_ptr<c10d::Store> store;
    int rank;
    c10::weak_intrusive_ptr<c10d::Backend> backend;
  };
  std::mutex made_mutex_;
  std::unordered_map<std::string, int> splits_;
  std::vector<Merged> merged_;

  // The open windows by the numbers of their threads, and how many they are.
  std::mutex windows_mutex_;
  std::unordered_map<uint64_t, Window> windows_;
  std::atomic<size_t> open_windows_ = 0;
};

}  // namespace unisono
