#include "observers.hpp"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <system_error>
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

// How long an abort hook may take before the next one is called beside it.
constexpr std::chrono::milliseconds kMoment(50);
// How long all of them may take to be called, on a host with far more ranks than cores.
constexpr std::chrono::seconds kMoments(10);

// Threads that run abort hooks, and the process that has them: a forked child does not.
std::atomic<size_t> abort_threads = 0;
std::atomic<pid_t> abort_threads_owner = 0;

// Runs `body` on a thread that drain_abort_hooks() waits for.
template <typename Body>
void beside(Body body) {
  const pid_t me = ::getpid();
  if (abort_threads_owner.exchange(me) != me) abort_threads = 0;
  abort_threads.fetch_add(1, std::memory_order_relaxed);
  auto counted = std::make_shared<Body>(std::move(body));
  auto run = [counted]() mutable {
    (*counted)();
    // It may hold Python objects, which must go before the interpreter may.
    counted.reset();
    abort_threads.fetch_sub(1, std::memory_order_release);
  };
  try {
    std::thread(run).detach();
  } catch (const std::system_error&) {
    // There are no more threads to be had. Late errors are better than no record of the failure.
    run();
  }
}

// Calls `hook` beside, and returns when it has returned or its moment is over.
void call_beside(std::shared_ptr<std::function<void()>> hook) {
  struct Progress {
    std::promise<void> begun;
    std::promise<void> ended;
  };
  auto progress = std::make_shared<Progress>();
  auto begun = progress->begun.get_future();
  auto ended = progress->ended.get_future();
  beside([hook = std::move(hook), progress] {
    progress->begun.set_value();
    call(hook);
    progress->ended.set_value();
  });
  begun.wait();
  ended.wait_for(kMoment);
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
  // A hook that it replaces is destroyed after the lock is gone: it may hold Python objects.
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
  under_way_.fetch_sub(1, std::memory_order_release);
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

void Observers::dead() {
  std::vector<std::shared_ptr<AbortHook>> hooks;
  std::promise<void> all_called;
  {
    std::lock_guard lock(mutex_);
    hooks = abort_hooks_.all();
    if (hooks.empty() || all_called_.valid()) return;
    all_called_ = all_called.get_future().share();
  }
  beside([hooks = std::move(hooks), all_called = std::move(all_called)]() mutable {
    for (auto& hook : hooks) call_beside(std::move(hook));
    all_called.set_value();
  });
}

void Observers::await_abort_hooks() {
  std::shared_future<void> all_called;
  {
    std::lock_guard lock(mutex_);
    all_called = all_called_;
  }
  // A forked child has none of the threads.
  if (!all_called.valid() || abort_threads_owner != ::getpid()) return;
  all_called.wait_for(kMoments);
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
  while (!all_ended() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void drain_abort_hooks() {
  if (abort_threads_owner != ::getpid()) return;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (abort_threads.load(std::memory_order_acquire) > 0 &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace unisono
