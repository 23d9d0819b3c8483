// Hooks that are called when the works of a backend end, and the extra time that some works get.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
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
// seconds: torch's flight recorder writes all it holds to a file. When the group dies or is aborted
// they run beside, once, so that no wait, no other completion and no other rank comes after them:
// in the order of their ids, each on a thread of its own, so that one that is slow keeps the next
// ones waiting for a moment only. While nothing has been asked for a work costs two atomic
// operations.
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
    std::map<int64_t, std::shared_ptr<Hook>> hooks_;
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
  // The group is dead: the abort hooks run beside the caller, once.
  void dead();
  // Until each of the abort hooks, if they run, has returned or has had its moment: what it looks
  // at first may go then.
  void await_abort_hooks();

  // Calls no hook from now on.
  void silence();

  // Whether every work that has begun has ended and its hooks have returned.
  bool all_ended() const { return under_way_.load(std::memory_order_acquire) == 0; }
  // Until that is so, but no longer than until then.
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
  // One work fewer is under way.
  void leave();

  std::atomic<size_t> under_way_ = 0;
  // A hook or extra time has been asked for, so works must be tracked.
  std::atomic<bool> asked_ = false;
  std::mutex mutex_;
  Hooks<AbortHook> abort_hooks_;
  Hooks<CompletionHook> completion_hooks_;
  std::shared_ptr<WorkHook> work_hook_;
  std::vector<Extension> extensions_;
  // Of the abort hooks, once they run: the last one has been called.
  std::shared_future<void> all_called_;
};

// Waits until the abort hooks of every group that has died have returned, before the interpreter
// goes. A minute at the most: the flight recorder takes two seconds, and many times that on a host
// with far more ranks than cores.
void drain_abort_hooks();

}  // namespace unisono
