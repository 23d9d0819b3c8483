// A backend's life: its making and end, groups made from it, its observers, windows of calls.
#include <algorithm>
#include <utility>

#include "backend.hpp"
#include "batch.hpp"
#include "convert.hpp"
#include "registry.hpp"

namespace unisono {

Backend::Backend(rust::Box<Group> group, int rank, int size, c10::intrusive_ptr<Options> options,
                 std::vector<Setting> settings)
    : c10d::Backend(rank, size),
      handle_(std::make_shared<Handle>(std::move(group))),
      options_(std::move(options)),
      settings_(std::move(settings)) {
  init();
  remember(handle_);
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
  label += c10::str("#", splits_[label]++);
  Joined part = subgroup(*handle_->group, {members.data(), members.size()}, str(label));
  raise(part.status);
  const auto& base = opts ? opts : options_;
  auto options = c10::make_intrusive<Options>(*base);
  auto backend = c10::make_intrusive<Backend>(std::move(part.group), me - ranks.begin(),
                                              ranks.size(), std::move(options), settings_);
  backend->setTimeout(base->timeout);
  return backend;
}

c10::intrusive_ptr<c10d::Backend> Backend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const c10::intrusive_ptr<Options>& opts,
                                                 const int& rank, const int& size) {
  // torch 2.11 asks once for each kind of device. Every merge draws its ranks from its store, so
  // one that gives this rank again is still at the same merge.
  if (merged_ && merged_->rank == rank && merged_->store.lock() == store) {
    if (auto backend = merged_->backend.lock()) return backend;
  }
  auto options = c10::make_intrusive<Options>(opts ? *opts : *options_);
  c10::intrusive_ptr<c10d::Backend> backend = join_group(store, rank, size, options, settings_);
  backend->setTimeout(options->timeout);
  using c10::weak_intrusive_ptr;
  merged_.emplace(weak_intrusive_ptr<c10d::Store>(store), rank,
                  weak_intrusive_ptr<c10d::Backend>(backend));
  return backend;
}

Backend::Window Backend::window() {
  if (window_.load(std::memory_order_acquire) == Window::None) return Window::None;
  std::lock_guard lock(window_mutex_);
  return window_owner_ == std::this_thread::get_id() ? window_.load() : Window::None;
}

void Backend::open(Window window) {
  std::vector<WorkPointer> stale;
  std::lock_guard lock(window_mutex_);
  const auto me = std::this_thread::get_id();
  // A window of this thread was left by an exception; torch does not close it then.
  TORCH_CHECK(window_ == Window::None || window_owner_ == me,
              "unisono: another thread is coalescing or estimating the calls of this group");
  window_owner_ = me;
  batch_.swap(stale);
  receives_.clear();
  sends_to_self_.clear();
  estimate_ = 0;
  window_ = window;
}

void Backend::startCoalescing() {
  open(Window::Batch);
}

Backend::WorkPointer Backend::endCoalescing() {
  std::vector<WorkPointer> works;
  std::vector<std::function<WorkPointer()>> receives;
  std::vector<std::function<WorkPointer()>> sends;
  TORCH_CHECK(window() == Window::Batch, "unisono: endCoalescing without startCoalescing");
  {
    std::lock_guard lock(window_mutex_);
    works.swap(batch_);
    receives.swap(receives_);
    sends.swap(sends_to_self_);
    window_ = Window::None;
  }
  for (const auto& call : receives) works.push_back(call());
  for (const auto& call : sends) works.push_back(call());
  std::vector<at::Device> devices;
  for (const WorkPointer& work : works) {
    const auto* on_device = dynamic_cast<const DeviceWork*>(work.get());
    if (on_device) devices.push_back(on_device->stream().device());
  }
  return c10::make_intrusive<Batch>(getRank(), std::move(works), std::move(devices));
}

void Backend::postpone(bool sends, std::function<WorkPointer()> call) {
  std::lock_guard lock(window_mutex_);
  (sends ? sends_to_self_ : receives_).push_back(std::move(call));
}

Backend::WorkPointer Backend::started(WorkPointer work, bool async) {
  if (window() != Window::Batch) return work;
  std::lock_guard lock(window_mutex_);
  batch_.push_back(work);
  // A caller that would wait at once waits for the batch.
  if (!async) return nullptr;
  return work;
}

Backend::WorkPointer Backend::estimated(double microseconds) {
  std::lock_guard lock(window_mutex_);
  estimate_ += microseconds;
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
  open(Window::Estimate);
}

float Backend::endTimeEstimate() {
  TORCH_CHECK(window() == Window::Estimate, "unisono: endTimeEstimate without startTimeEstimate");
  std::lock_guard lock(window_mutex_);
  window_ = Window::None;
  return static_cast<float>(estimate_);
}
#endif

}  // namespace unisono
