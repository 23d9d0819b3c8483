// A backend's life: its making and end, groups made from it, its observers, windows of calls.
#include <algorithm>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "backend.hpp"
#include "batch.hpp"
#include "convert.hpp"
#include "registry.hpp"
#include "symmetric.hpp"

namespace unisono {

Backend* backend_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  for (const auto& device : group->getDeviceTypes()) {
    auto* backend = dynamic_cast<Backend*>(group->getBackend(device.type()).get());
    if (backend != nullptr) return backend;
  }
  return nullptr;
}

Backend::Backend(rust::Box<Group> group, int rank, int size, c10::intrusive_ptr<Options> options,
                 std::vector<Setting> settings)
    : c10d::Backend(rank, size),
      handle_(std::make_shared<Handle>(std::move(group))),
      options_(std::move(options)),
      settings_(std::move(settings)) {
  init();
  remember(handle_);
  serve_symmetric_memory();
}

Backend::~Backend() {
  close();
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  handle_->group->set_timeout(timeout.count());
}

c10d::ErrorType Backend::getError() {
  const Status status = handle_->group->error();
  switch (static_cast<Code>(status.code)) {
    case Code::Success:
      return c10d::ErrorType::SUCCESS;
    case Code::Timeout:
      return c10d::ErrorType::TIMEOUT;
    case Code::PeerLost:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

void Backend::abort() {
  // First of all: the other ranks hear of it however long the hooks take.
  handle_->abort("the process group was aborted");
  handle_->observers.dead();
  end_observation();
}

void Backend::keep_until_the_end(std::shared_ptr<void> observer) {
  std::lock_guard lock(observers_mutex_);
  observers_.push_back(std::move(observer));
}

void Backend::end_observation() {
  // torch's flight recorder loses its hooks next, and with them what it has not begun to write.
  handle_->observers.await_abort_hooks();
  // Destroyed after the lock is gone: they take their hooks back.
  std::vector<std::shared_ptr<void>> observers;
  std::lock_guard lock(observers_mutex_);
  observers.swap(observers_);
}

c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store>& /*store*/,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<Options>& opts) {
  // The store is not needed, and nothing is sent: torch may call this once on some ranks and, for
  // each kind of device, several times on others. Members, which share the name, count alike.
  std::vector<size_t> members;
  for (const int rank : ranks) {
    check_rank(rank, "ranks");
    members.push_back(rank);
  }
  const auto me = std::find(ranks.begin(), ranks.end(), getRank());
  if (me == ranks.end()) return nullptr;
  auto label = opts ? opts->group_name : std::string();
  for (const int rank : ranks) label += c10::str(",", rank);
  {
    std::lock_guard lock(made_mutex_);
    label += c10::str("#", splits_[label]++);
  }
  Joined part = subgroup(*handle_->group, {members.data(), members.size()}, str(label));
  raise(part.status);
  const auto& base = opts ? opts : options_;
  auto options = c10::make_intrusive<Options>(*base);
  auto backend = c10::make_intrusive<Backend>(std::move(part.group), me - ranks.begin(),
                                              ranks.size(), std::move(options), settings_);
  backend->setTimeout(base->timeout);
  return backend;
}

std::vector<int64_t> Backend::mask(const std::vector<int64_t>& ranks_to_exclude) {
  std::vector<size_t> excluded;
  for (const int64_t rank : ranks_to_exclude) {
    check_rank(rank, "exclude");
    excluded.push_back(rank);
  }
  const Left left = unisono::mask(*handle_->group, {excluded.data(), excluded.size()});
  raise(left.status);
  handle_->renew();
  living_ = static_cast<int>(left.living.size());
  Job::keep_what_is_not_written();
  return {left.living.begin(), left.living.end()};
}

std::string Backend::stats() const {
  return std::string(handle_->group->stats());
}

c10::intrusive_ptr<c10d::Backend> Backend::shrink(const std::vector<int64_t>& ranks_to_exclude,
                                                  int shrink_flags,
                                                  const c10::intrusive_ptr<Options>& opts) {
  // torch's SHRINK_ABORT; it has no name in C++.
  constexpr int kAbort = 1;
  std::vector<size_t> excluded;
  for (const int64_t rank : ranks_to_exclude) {
    check_rank(rank, "ranks_to_exclude");
    excluded.push_back(rank);
  }
  std::sort(excluded.begin(), excluded.end());
  // A group that has failed has nothing under way, and its ranks may be agreeing by now.
  const bool lives = handle_->group->error().code == 0;
  if ((shrink_flags & kAbort) && lives) handle_->abort("shrink_group was called with SHRINK_ABORT");
  Joined left = unisono::shrink(*handle_->group, {excluded.data(), excluded.size()});
  raise(left.status);
  const int me = getRank();
  const auto before = std::count_if(excluded.begin(), excluded.end(),
                                    [me](size_t rank) { return static_cast<int>(rank) < me; });
  const auto& base = opts ? opts : options_;
  auto options = c10::make_intrusive<Options>(*base);
  auto& global = options->global_ranks_in_group;
  if (global.size() == static_cast<size_t>(getSize())) {
    std::for_each(excluded.rbegin(), excluded.rend(),
                  [&global](size_t rank) { global.erase(global.begin() + rank); });
  }
  auto backend =
      c10::make_intrusive<Backend>(std::move(left.group), me - before, getSize() - excluded.size(),
                                   std::move(options), settings_);
  backend->setTimeout(base->timeout);
  return backend;
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
c10d::ReconfigureHandle Backend::get_reconfigure_handle() const {
  const Handed handed = unisono::reconfigure_handle(*handle_->group);
  raise(handed.status);
  return std::string(handed.text);
}

Backend::WorkPointer Backend::reconfigure(const c10d::ReconfigureOptions& opts) {
  const bool is_ordered = std::holds_alternative<std::vector<std::string>>(opts.handles);
  rust::Vec<rust::String> handles;
  std::visit(
      [&handles](const auto& given) {
        for (const std::string& handle : given) handles.push_back(rust::String::lossy(handle));
      },
      opts.handles);
  const Formed formed =
      unisono::reconfigure(*handle_->group, std::move(handles), is_ordered, opts.uuid);
  raise(formed.status);
  handle_->renew();
  rank_ = static_cast<int>(formed.rank);
  size_ = static_cast<int>(formed.size);
  living_ = 0;
  setTimeout(options_->timeout);
  // It is done when all members have come.
  c10d::BarrierOptions barrier;
  barrier.asyncOp = true;
  if (opts.timeout) barrier.timeout = *opts.timeout;
  return this->barrier(barrier);
}
#endif

c10::intrusive_ptr<c10d::Backend> Backend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const c10::intrusive_ptr<Options>& opts,
                                                 const int& rank, const int& size) {
  // torch 2.11 asks once for each kind of device. Every merge draws its ranks from its store, so
  // one that gives this rank again is still at the same merge.
  {
    std::lock_guard lock(made_mutex_);
    std::erase_if(merged_, [](const Merged& made) { return made.backend.expired(); });
    for (const Merged& made : merged_) {
      if (made.rank != rank || made.store.lock() != store) continue;
      if (auto backend = made.backend.lock()) return backend;
    }
  }
  auto options = c10::make_intrusive<Options>(opts ? *opts : *options_);
  c10::intrusive_ptr<c10d::Backend> backend = join_group(store, rank, size, options, settings_);
  backend->setTimeout(options->timeout);
  std::lock_guard lock(made_mutex_);
  merged_.push_back({.store = c10::weak_intrusive_ptr<c10d::Store>(store),
                     .rank = rank,
                     .backend = c10::weak_intrusive_ptr<c10d::Backend>(backend)});
  return backend;
}

namespace {

// A number of its own for each thread. Not its id, which goes to another one when it has ended.
uint64_t this_thread() {
  static std::atomic<uint64_t> threads = 0;
  thread_local const uint64_t number = ++threads;
  return number;
}

}  // namespace

Backend::Window* Backend::window(Window::Kind kind) {
  if (open_windows_.load(std::memory_order_acquire) == 0) return nullptr;
  std::lock_guard lock(windows_mutex_);
  const auto found = windows_.find(this_thread());
  return found != windows_.end() && found->second.kind == kind ? &found->second : nullptr;
}

void Backend::open(Window::Kind kind) {
  // Dropped without the lock. A window of this thread was left by an exception; torch does not
  // close it then.
  Window stale;
  std::lock_guard lock(windows_mutex_);
  Window& mine = windows_[this_thread()];
  std::swap(mine, stale);
  mine.kind = kind;
  open_windows_.store(windows_.size(), std::memory_order_release);
}

Backend::Window Backend::close(Window::Kind kind, const char* call) {
  std::lock_guard lock(windows_mutex_);
  const auto found = windows_.find(this_thread());
  TORCH_CHECK(found != windows_.end() && found->second.kind == kind, "unisono: end", call,
              " without start", call, " in the same thread");
  Window window = std::move(found->second);
  windows_.erase(found);
  open_windows_.store(windows_.size(), std::memory_order_release);
  return window;
}

void Backend::startCoalescing() {
  open(Window::Kind::Batch);
}

Backend::WorkPointer Backend::endCoalescing() {
  Window window = close(Window::Kind::Batch, "Coalescing");
  std::vector<WorkPointer>& works = window.batch;
  for (const auto& call : window.receives) works.push_back(call());
  for (const auto& call : window.sends_to_self) works.push_back(call());
  std::vector<at::Device> devices;
  for (const WorkPointer& work : works) {
    const auto* on_device = dynamic_cast<const DeviceWork*>(work.get());
    if (on_device) devices.push_back(on_device->stream().device());
  }
  return c10::make_intrusive<Batch>(getRank(), std::move(works), std::move(devices));
}

Backend::WorkPointer Backend::started(WorkPointer work, bool async) {
  Window* const window = this->window(Window::Kind::Batch);
  if (!window) return work;
  window->batch.push_back(work);
  // A caller that would wait at once waits for the batch.
  if (!async) return nullptr;
  return work;
}

Backend::WorkPointer Backend::estimated(Window& window, double microseconds) const {
  window.estimate += microseconds;
  // Complete, and no observer hears of it.
  return c10::make_intrusive<Batch>(getRank(), std::vector<WorkPointer>(),
                                    std::vector<at::Device>());
}

void Backend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  TORCH_CHECK(onCompletionHook_ == nullptr, "unisono: an on-completion hook is registered already");
  TORCH_CHECK(hook != nullptr, "unisono: the on-completion hook is empty");
  // hasHooks() looks at this one.
  onCompletionHook_ = std::move(hook);
  handle_->observers.set_work_hook(onCompletionHook_);
}

#ifdef C10D_BACKEND_HAS_HOOKS
void Backend::registerAbortHook(int64_t hook_id, c10d::AbortHook hook) {
  handle_->observers.add_abort_hook(hook_id, std::move(hook));
}

void Backend::unregisterAbortHook(int64_t hook_id) {
  handle_->observers.remove_abort_hook(hook_id);
}

void Backend::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  handle_->observers.extend(timeout);
}

std::unordered_map<std::string, uint64_t> Backend::getMemoryStats() {
  std::unordered_map<std::string, uint64_t> stats;
  for (const Usage& usage : handle_->group->memory()) {
    stats.emplace(std::string(usage.name), usage.amount);
  }
  return stats;
}
#endif

#if TORCH_VERSION_MINOR >= 15
void Backend::registerCompletionHook(int64_t hook_id, c10d::CompletionHook hook) {
  handle_->observers.add_completion_hook(
      hook_id, [hook = std::move(hook)](uint64_t key, float milliseconds) {
        hook({.completionKey = key, .duration_ms = milliseconds});
      });
}

void Backend::unregisterCompletionHook(int64_t hook_id) {
  handle_->observers.remove_completion_hook(hook_id);
}

void Backend::startTimeEstimate() {
  open(Window::Kind::Estimate);
}

float Backend::endTimeEstimate() {
  return static_cast<float>(close(Window::Kind::Estimate, "TimeEstimate").estimate);
}
#endif

}  // namespace unisono
