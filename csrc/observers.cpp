#include "observers.hpp"

#include <c10/util/Exception.h>

#include <thread>

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
  if (ending.dead) aborting();
  if (ending.failed) return;
  for (const auto& hook : hooks) call(hook, ending.key, ending.milliseconds);
  if (!work_hook) return;
  const std::chrono::duration<float, std::milli> active(ending.milliseconds);
  const auto took = std::chrono::duration_cast<std::chrono::steady_clock::duration>(active);
  call(work_hook, std::make_shared<c10d::WorkInfo>(
                      ending.type, ending.sequence, ending.started, ending.started + took,
                      std::chrono::duration_cast<std::chrono::duration<float>>(active)));
}

void Observers::aborting() {
  std::vector<std::shared_ptr<AbortHook>> hooks;
  {
    std::lock_guard lock(mutex_);
    hooks = abort_hooks_.all();
  }
  for (const auto& hook : hooks) call(hook);
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

void Observers::wait_for_all() {
  for (size_t left; (left = under_way_.load(std::memory_order_acquire)) > 0;) {
    under_way_.wait(left, std::memory_order_acquire);
  }
}

}  // namespace unisono
