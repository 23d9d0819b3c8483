// Hooks that are called when the works of a backend end, and the extra time that some works get.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <unordered_map>
#include <vector>

namespace unisono {

// How a work ended.
struct Ending {
  uint64_t key;
  c10d::OpType type;
  uint64_t sequence;
  std::chrono::steady_clock::time_point started;
  float milliseconds;
  bool failed;
  // And the group with it.
  bool dead;
};

// Shared by a backend and its works, which may outlive it.
//
// Hooks are called without a lock. Those for completions are short, and called by the thread that
// settles the work: one in wait(), or the one that runs completions. Those for aborts may take
// seconds: torch's flight recorder writes all it holds to a file. When the group dies they run on a
// thread of their own, so that no wait and no other completion comes after them. While nothing has
// been asked for a work costs two atomic operations.
class Observers {
 public:
  // Hooks by the id they were registered under.
  template <typename Hook>
  class Hooks {
   public:
    // Leaves in `hook` the one it replaces.
    void put(int64_t id, std::shared_ptr<Hook>& hook) { hooks_[id].swap(hook); }
    std::shared_ptr<Hook> take(int64_t id);
    std::vector<std::shared_ptr<Hook>> all() const;

   private:
    std::unordered_map<int64_t, std::shared_ptr<Hook>> hooks_;
  };
  using AbortHook = std::function<void()>;
  using CompletionHook = std::function<void(uint64_t key, float milliseconds)>;
  using WorkHook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  void add_abort_hook(int64_t id, AbortHook hook);
  void remove_abort_hook(int64_t id);
  void add_completion_hook(int64_t id, CompletionHook hook);
  void remove_completion_hook(int64_t id);
  void set_work_hook(WorkHook hook);

  // From now on works get `extra` on top of their own limit, until the first of them has ended.
  void extend(std::chrono::milliseconds extra);

  // A work begins; the result is its extra time.
  std::chrono::milliseconds begin(uint64_t key);
  // It has ended, and its results are in place; `describe` says how, if a hook is registered.
  template <typename Describe>
  void end(const Describe& describe) {
    if (asked_.load(std::memory_order_acquire)) tell(describe());
    leave();
  }
  // It never started.
  void forget(uint64_t key);
  // The backend is about to abort: the abort hooks have returned when this does.
  void aborting();

  // Calls no hook from now on.
  void silence();

  // Until every work that has begun has ended and its hooks have returned.
  void wait_for_all();
  // The same, but no longer than until then.
  void wait_for_all(std::chrono::steady_clock::time_point deadline);

 private:
  struct Extension {
    std::chrono::milliseconds extra;
    // The first work after it, whose end is its end.
    std::optional<uint64_t> until;
  };

  template <typename Hook>
  void add(Hooks<Hook>& hooks, int64_t id, Hook hook);
  template <typename Hook>
  void remove(Hooks<Hook>& hooks, int64_t id);
  void tell(const Ending& ending);
  // The group is dead: the abort hooks run beside the caller, once.
  void dead();
  std::vector<std::shared_ptr<AbortHook>> abort_hooks();
  // One work fewer is under way.
  void leave();

  std::atomic<size_t> under_way_ = 0;
  // A hook or extra time has been asked for, so works must be tracked.
  std::atomic<bool> asked_ = false;
  // The abort hooks have been called, or are about to be.
  std::atomic<bool> told_of_death_ = false;
  std::mutex mutex_;
  Hooks<AbortHook> abort_hooks_;
  Hooks<CompletionHook> completion_hooks_;
  std::shared_ptr<WorkHook> work_hook_;
  std::vector<Extension> extensions_;
};

// Waits until the abort hooks of every group that has died have returned, before what they look at
// goes: their groups, or the interpreter. A minute at the most: the flight recorder takes two
// seconds, and many times that on a host with far more ranks than cores.
void drain_abort_hooks();

}  // namespace unisono
