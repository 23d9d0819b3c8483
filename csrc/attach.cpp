// How a backend comes into being: an operator that Python calls with a boxed process group, whose
// store the ranks meet through. No pybind11, and so no dependence on the version of Python.
#include <torch/headeronly/version.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "convert.hpp"
#include "registry.hpp"

namespace unisono {
namespace {

Fetched fetched(Status status, bool found = false, rust::Vec<uint8_t> value = {}) {
  return Fetched{std::move(status), found, std::move(value)};
}

Status failure(Code code, const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text =
      torch_error ? torch_error->what_without_backtrace() : std::string(error.what());
  return Status{.code = static_cast<uint8_t>(code), .message = "torch's store: " + text};
}

// The prefix of our keys, as torch may hand the same store to others. And to us again: torchrun
// gives the workers it restarts the store of those that died. Its count of restarts tells them
// apart when there is one agent; several agents may count differently.
std::string prefix() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value ? value : "");
  };
  const auto restarts = variable("TORCHELASTIC_RESTART_COUNT");
  if (restarts.empty() || variable("GROUP_WORLD_SIZE") != "1") return "unisono";
  return "unisono/" + restarts;
}

// torch's store as the core uses it.
class TorchStore final : public Store {
 public:
  TorchStore(const c10::intrusive_ptr<c10d::Store>& store, int rank,
             const std::vector<uint64_t>& ranks, int size)
      : all_(store),
        store_(c10::make_intrusive<c10d::PrefixStore>(prefix(), store)),
        rank_(rank),
        size_(size),
        // Rank 0 of all serves it; a group that does not say which ranks it has is that of all.
        has_server_(ranks.empty() || ranks.front() == 0) {}

  StorePlace place() const noexcept override {
    const auto underlying = store_->getUnderlyingNonPrefixStore();
    StorePlace place{};
    place.ends_with_rank_0 = true;
    if (const auto* tcp = dynamic_cast<const c10d::TCPStore*>(underlying.get())) {
      place.host = tcp->getHost();
      place.port = tcp->getPort();
      // torchrun's agent serves it, and outlives its workers.
      const char* agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
      place.ends_with_rank_0 = has_server_ && (!agent || std::string(agent) != "True");
    } else if (const auto* file = dynamic_cast<const c10d::FileStore*>(underlying.get())) {
      place.file = rust::String::lossy(file->getPath());
      place.ends_with_rank_0 = false;
    }
    return place;
  }

  Status set(rust::Str key, rust::Slice<const uint8_t> value) const noexcept override {
    try {
      store_->set(std::string(key), std::vector<uint8_t>(value.begin(), value.end()));
      return Status{};
    } catch (const std::exception& error) {
      return failure(Code::System, error);
    }
  }

  // Asks again and again instead of calling the store's own wait, which logs a warning for every
  // limit that runs out while the core looks around between short waits. A key that came is seen
  // within a quarter of the time it took, and soon by the eye: another rank may wait for that.
  // Signals are heard meanwhile.
  Fetched wait(rust::Str key, uint64_t timeout_ms) const noexcept override {
    using Clock = std::chrono::steady_clock;
    const auto started = Clock::now();
    const auto limit = std::chrono::milliseconds(timeout_ms);
    for (;;) {
      Fetched result = fetch(key);
      if (result.found || result.status.code != 0) return result;
      const auto waited = Clock::now() - started;
      if (waited >= limit) {
        const auto code = static_cast<uint8_t>(Code::Timeout);
        auto text =
            c10::str("torch's store has no key ", std::string(key), " after ", timeout_ms, " ms");
        return fetched(Status{code, std::move(text)});
      }
      if (Status other = someone_on_gloo(); other.code != 0) return fetched(std::move(other));
      const Clock::duration pause =
          std::clamp<Clock::duration>(waited / 4, std::chrono::milliseconds(1), longest_pause());
      const auto end = Clock::now() + std::min<Clock::duration>(pause, limit - waited);
      do {
        std::this_thread::sleep_for(std::min<Clock::duration>(end - Clock::now(), kSlice));
        if (Status heard = check_signals(); heard.code != 0) return fetched(std::move(heard));
      } while (Clock::now() < end);
    }
  }

  Fetched fetch(rust::Str key) const noexcept override {
    const std::string name(key);
    try {
      return store_->check({name}) ? found(store_->get(name)) : fetched(Status{});
    } catch (const std::exception& error) {
      return fetched(failure(Code::System, error));
    }
  }

 private:
  // All ranks together ask some thousand times a second at most.
  std::chrono::milliseconds longest_pause() const {
    return std::chrono::milliseconds(std::clamp(size_, 200, 2000));
  }

  static Fetched found(const std::vector<uint8_t>& bytes) {
    rust::Vec<uint8_t> value;
    value.reserve(bytes.size());
    std::copy(bytes.begin(), bytes.end(), std::back_inserter(value));
    return fetched(Status{}, true, std::move(value));
  }

  // A rank that makes the same group on torch's own gloo writes its address under the key "0/RANK"
  // and waits for ours, as we for its. Looked for now and then, once something is late.
  Status someone_on_gloo() const noexcept {
    using Clock = std::chrono::steady_clock;
    const auto now = Clock::now();
    {
      std::lock_guard lock(mutex_);
      if (now < next_look_) return Status{};
      const bool first = next_look_ == Clock::time_point{};
      pause_ = first ? std::chrono::seconds(1) : std::min(2 * pause_, std::chrono::seconds(16));
      next_look_ = now + pause_;
      if (first) return Status{};
    }
    try {
      for (int other = 0; other < std::min(size_, kAsked); ++other) {
        if (other == rank_ || !all_->check({c10::str("0/", other)})) continue;
        return Status{
            .code = static_cast<uint8_t>(Code::Mismatch),
            .message = c10::str(
                "rank ", other, " makes this group with torch's own gloo, rank ", rank_,
                " with unisono: all ranks of a group need the same backend; where "
                "UNISONO_AS_GLOO puts unisono in gloo's place, set it on every rank, and see that "
                "every rank has unisono installed")};
      }
    } catch (const std::exception&) {
      // The wait itself will meet the same error, and report it.
    }
    return Status{};
  }

  // How long a handler of a signal may have to wait.
  static constexpr std::chrono::milliseconds kSlice{50};
  // More ranks than that need not be asked: one suffices.
  static constexpr int kAsked = 64;

  const c10::intrusive_ptr<c10d::Store> all_;
  const c10::intrusive_ptr<c10d::PrefixStore> store_;
  const int rank_;
  const int size_;
  const bool has_server_;
  mutable std::mutex mutex_;
  mutable std::chrono::steady_clock::time_point next_look_;
  mutable std::chrono::seconds pause_{0};
};

// Joins the group whose ranks meet through the store of `pg`, and makes it the backend of `pg`.
void attach(const c10::intrusive_ptr<c10d::ProcessGroup>& pg,
            const c10::Dict<std::string, std::string>& settings, int64_t timeout_ms,
            const std::vector<int64_t>& global_ranks) {
  std::vector<Setting> list;
  for (const auto& entry : settings) list.push_back(Setting{entry.key(), entry.value()});
  auto options =
      c10::make_intrusive<c10d::Backend::Options>("unisono", std::chrono::milliseconds(timeout_ms));
  options->global_ranks_in_group.assign(global_ranks.begin(), global_ranks.end());
  auto backend =
      join_group(pg->getStore(), pg->getRank(), pg->getSize(), std::move(options), std::move(list));
  pg->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                 c10::intrusive_ptr<c10d::Backend>(std::move(backend)));
}

// The same for a group whose members come later, by `reconfigure`.
void attach_apart(const c10::intrusive_ptr<c10d::ProcessGroup>& pg,
                  const c10::Dict<std::string, std::string>& settings, int64_t timeout_ms) {
  std::vector<Setting> list;
  for (const auto& entry : settings) list.push_back(Setting{entry.key(), entry.value()});
  Joined joined = apart({list.data(), list.size()});
  raise(joined.status);
  auto options =
      c10::make_intrusive<c10d::Backend::Options>("unisono", std::chrono::milliseconds(timeout_ms));
  auto backend = c10::make_intrusive<Backend>(std::move(joined.group), pg->getRank(), pg->getSize(),
                                              std::move(options), std::move(list));
  pg->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                 c10::intrusive_ptr<c10d::Backend>(std::move(backend)));
}

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Handle>> handles;
};

// The groups whose threads this process has.
Registry& registry() {
  return of_this_process<Registry>();
}

}  // namespace

c10::intrusive_ptr<Backend> join_group(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                       int size, c10::intrusive_ptr<c10d::Backend::Options> options,
                                       std::vector<Setting> settings) {
  const std::vector<uint64_t>& numbers = options->global_ranks_in_group;
  const TorchStore meeting(store, rank, numbers, size);
  Joined joined = join(meeting, rank, size, {numbers.data(), numbers.size()},
                       {settings.data(), settings.size()});
  raise(joined.status);
  return c10::make_intrusive<Backend>(std::move(joined.group), rank, size, std::move(options),
                                      std::move(settings));
}

void remember(const std::shared_ptr<Handle>& handle) {
  std::lock_guard lock(registry().mutex);
  auto& handles = registry().handles;
  std::erase_if(handles, [](const auto& known) { return known.expired(); });
  handles.push_back(handle);
}

void close_all() noexcept {
  std::vector<std::weak_ptr<Handle>> handles;
  {
    std::lock_guard lock(registry().mutex);
    handles.swap(registry().handles);
  }
  // Operations that every rank has begun get a second to end in good order. An interpreter that
  // exits does not report those that do not.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  for (const auto& known : handles) {
    const auto handle = known.lock();
    if (!handle) continue;
    handle->observers.wait_for_all(deadline);
    handle->observers.silence();
    handle->close();
  }
  // Completions may run Python callbacks; after this the interpreter may go.
  drain_completions(std::chrono::seconds(5));
  drain_abort_hooks();
}

rust::String torch_version() noexcept {
  return rust::String(c10::str(TORCH_VERSION_MAJOR, ".", TORCH_VERSION_MINOR));
}

TORCH_LIBRARY(unisono, library) {
  library.def(
      "attach(__torch__.torch.classes.c10d.ProcessGroup pg, Dict(str, str) settings, "
      "int timeout_ms, int[] global_ranks) -> ()",
      attach);
  library.def(
      "attach_apart(__torch__.torch.classes.c10d.ProcessGroup pg, Dict(str, str) settings, "
      "int timeout_ms) -> ()",
      attach_apart);
  // Implemented in Python: torch's pools of memory are there.
  library.def("allocate(int size, ScalarType dtype, Device device) -> Tensor");
  define_operators(library);
  define_gloos_name(library);
}

}  // namespace unisono
