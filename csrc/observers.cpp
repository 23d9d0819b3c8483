#include "observers.hpp"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <system_error>
#include <thread>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "unisono/src/torch/bridge.rs.h"

namespace unisono {
namespace {

// A hook is foreign code; its exception has no caller to go to.
template <typename Hook, typename... Arguments>
void call(const std::shared_ptr<Hook>& hook, Arguments&&... arguments) noexcept {
  try {
    (*hook)(std::forward<Arguments>(arguments)...);
  } catch (const std::exception& error) {
    TORCH_WARN("unisono: a hook failed: ", error.what());
  }
}

// Torch's flight recorder names the frames of Python through its compiler, whose import takes
// seconds, and gives up on the names if its file takes more than 15. What it has given up on goes
// on in a thread that nothing waits for, and that ends the process if it meets the interpreter's
// end. So the import comes before, in a thread that exit waits for.
void prepare_flight_recorder() try {
  using c10d::getCvarBool;
  const bool writes =
      c10d::getCvarInt({"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}, 2000) > 0 &&
      getCvarBool({"TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"}, true);
  if (writes && getCvarBool({"TORCH_INCLUDE_STACK_TRACE"}, true)) import_compiler();
} catch (const std::exception&) {
  // A variable that makes no sense, which the recorder itself complains about.
}

// Threads that run abort hooks, and the process that has them: a forked child does not.
std::atomic<size_t> abort_threads = 0;
std::atomic<pid_t> abort_threads_owner = 0;
// This is one of them. A hook may end its group, which must not wait for the hook.
thread_local bool runs_abort_hooks = false;

}  // namespace

template <typename Hook>
std::shared_ptr<Hook> Observers::Hooks<Hook>::take(int64_t id) {
  const auto found = hooks_.find(id);
  if (found == hooks_.end()) return nullptr;
  auto hook = std::move(found->second);
  hooks_.erase(found);
  return hook;
}

template <typename Hook>
std::vector<std::shared_ptr<Hook>> Observers::Hooks<Hook>::all() const {
  std::vector<std::shared_ptr<Hook>> hooks;
  for (const auto& [id, hook] : hooks_) hooks.push_back(hook);
  return hooks;
}

template <typename Hook>
void Observers::add(Hooks<Hook>& hooks, int64_t id, Hook hook) {
  // What it replaces is destroyed after the lock is gone: it may hold Python objects.
  auto held = std::make_shared<Hook>(std::move(hook));
  std::lock_guard lock(mutex_);
  hooks.put(id, held);
  asked_ = true;
}

template <typename Hook>
void Observers::remove(Hooks<Hook>& hooks, int64_t id) {
  std::shared_ptr<Hook> gone;
  std::lock_guard lock(mutex_);
  gone = hooks.take(id);
}

void Observers::add_abort_hook(int64_t id, AbortHook hook) {
  add(abort_hooks_, id, std::move(hook));
}

void Observers::remove_abort_hook(int64_t id) {
  remove(abort_hooks_, id);
}

void Observers::add_completion_hook(int64_t id, CompletionHook hook) {
  add(completion_hooks_, id, std::move(hook));
}

void Observers::remove_completion_hook(int64_t id) {
  remove(completion_hooks_, id);
}

void Observers::set_work_hook(WorkHook hook) {
  auto held = std::make_shared<WorkHook>(std::move(hook));
  std::lock_guard lock(mutex_);
  work_hook_.swap(held);
  asked_ = true;
}

void Observers::extend(std::chrono::milliseconds extra) {
  std::lock_guard lock(mutex_);
  extensions_.push_back({extra, std::nullopt});
  asked_ = true;
}

std::chrono::milliseconds Observers::begin(uint64_t key) {
  under_way_.fetch_add(1, std::memory_order_relaxed);
  std::chrono::milliseconds extra{0};
  if (!asked_.load(std::memory_order_acquire)) return extra;
  std::lock_guard lock(mutex_);
  for (Extension& extension : extensions_) {
    extra += extension.extra;
    if (!extension.until) extension.until = key;
  }
  return extra;
}

void Observers::leave() {
  if (under_way_.fetch_sub(1, std::memory_order_release) == 1) under_way_.notify_all();
}

void Observers::forget(uint64_t key) {
  if (asked_.load(std::memory_order_acquire)) {
    std::lock_guard lock(mutex_);
    // The next work takes its place.
    for (Extension& extension : extensions_) {
      if (extension.until == key) extension.until.reset();
    }
  }
  leave();
}

void Observers::tell(const Ending& ending) {
  std::vector<std::shared_ptr<CompletionHook>> hooks;
  std::shared_ptr<WorkHook> work_hook;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(extensions_, [&](const auto& known) { return known.until == ending.key; });
    hooks = completion_hooks_.all();
    work_hook = work_hook_;
  }
  if (ending.dead) dead();
  if (ending.failed) return;
  for (const auto& hook : hooks) call(hook, ending.key, ending.milliseconds);
  if (!work_hook) return;
  const std::chrono::duration<float, std::milli> active(ending.milliseconds);
  const auto took = std::chrono::duration_cast<std::chrono::steady_clock::duration>(active);
  call(work_hook, std::make_shared<c10d::WorkInfo>(
                      ending.type, ending.sequence, ending.started, ending.started + took,
                      std::chrono::duration_cast<std::chrono::duration<float>>(active)));
}

std::vector<std::shared_ptr<Observers::AbortHook>> Observers::abort_hooks() {
  std::lock_guard lock(mutex_);
  return abort_hooks_.all();
}

void Observers::aborting() {
  told_of_death_ = true;
  for (const auto& hook : abort_hooks()) call(hook);
}

void Observers::dead() {
  auto hooks = abort_hooks();
  if (hooks.empty() || told_of_death_.exchange(true)) return;
  const pid_t me = ::getpid();
  if (abort_threads_owner.exchange(me) != me) abort_threads = 0;
  abort_threads.fetch_add(1, std::memory_order_relaxed);
  auto run = [hooks = std::move(hooks)]() mutable {
    runs_abort_hooks = true;
    prepare_flight_recorder();
    for (const auto& hook : hooks) call(hook);
    // They may hold Python objects, which must go before the interpreter may.
    hooks.clear();
    runs_abort_hooks = false;
    abort_threads.fetch_sub(1, std::memory_order_release);
  };
  try {
    std::thread(run).detach();
  } catch (const std::system_error&) {
    // There are no more threads to be had. Late errors are better than no record of the failure.
    run();
  }
}

void Observers::silence() {
  // Destroyed after the lock is gone.
  Hooks<AbortHook> abort_hooks;
  Hooks<CompletionHook> completion_hooks;
  std::shared_ptr<WorkHook> work_hook;
  std::lock_guard lock(mutex_);
  std::swap(abort_hooks, abort_hooks_);
  std::swap(completion_hooks, completion_hooks_);
  work_hook.swap(work_hook_);
}

void Observers::wait_for_all(std::chrono::steady_clock::time_point deadline) {
  // There is no wait for an atomic with a limit.
  while (under_way_.load(std::memory_order_acquire) > 0 &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void drain_abort_hooks() {
  if (runs_abort_hooks || abort_threads_owner != ::getpid()) return;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (abort_threads.load(std::memory_order_acquire) > 0 &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Observers::wait_for_all() {
  for (size_t left; (left = under_way_.load(std::memory_order_acquire)) > 0;) {
    under_way_.wait(left, std::memory_order_acquire);
  }
}

}  // namespace unisono
