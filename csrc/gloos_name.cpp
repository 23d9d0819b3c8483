// In gloo's place torch's flight recorder and health check know our groups by gloo's name.
//
// They ask a backend for its name, and the recorder leaves alone what is called gloo: that records
// by itself, in the place where torch's tools look if they are told nothing else. So the hook is
// attached to our backend under its own name, and then made to record in that place.
#include <torch/headeronly/version.h>
#include <torch/library.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "backend.hpp"
#include "registry.hpp"

#if TORCH_VERSION_MINOR == 15
#include <torch/csrc/distributed/c10d/hooks/FlightRecorderHook.hpp>
#include <torch/csrc/distributed/c10d/hooks/HealthCheck.hpp>
#endif

namespace unisono {

#if TORCH_VERSION_MINOR == 15
namespace {

using c10d::FlightRecorderHook;

// Where a hook records is private to it. The arguments of an explicit instantiation may name it all
// the same.
void (*record_as_gloo)(FlightRecorderHook& hook) = nullptr;

template <auto by_device, auto otherwise>
struct Targets {
  static void move_to_gloo(FlightRecorderHook& hook) {
    const auto move = [](auto& target) {
      if (target.name != "unisono") return;
      target.name = c10d::kDefaultFRBackend;
      target.recorder = c10d::getFlightRecorder(target.name);
    };
    move(hook.*otherwise);
    for (auto& [device, target] : hook.*by_device) move(target);
  }
  static inline const bool is_known = (record_as_gloo = move_to_gloo, true);
};

template struct Targets<&FlightRecorderHook::targets_, &FlightRecorderHook::default_target_>;

// Torch gives its own hooks numbers from 0x46524543 and 0x4845414c on, and a user's are small.
constexpr int64_t kHealthHook = 0x554e4953;

}  // namespace

void known_as_gloo(const c10::intrusive_ptr<c10d::ProcessGroup>& pg,
                   const std::vector<int64_t>& global_ranks) {
  auto* backend = dynamic_cast<Backend*>(pg->getBackend(c10::kCPU).get());
  TORCH_CHECK(backend, "unisono: no backend of unisono's serves the CPU in this group");
  auto* recorder = c10d::getFlightRecorder(c10d::kDefaultFRBackend);
  if (!recorder->enabled_) return;
  const std::vector<uint64_t> ranks(global_ranks.begin(), global_ranks.end());
  auto hook = FlightRecorderHook::attach(pg, ranks);
  record_as_gloo(*hook);
  recorder->setRank(static_cast<int>(ranks.at(pg->getRank())));
  {
    std::lock_guard lock(recorder->mutex_);
    recorder->pg_name_to_ranks_[{pg->getGroupName(), pg->getGroupDesc()}] = ranks;
  }
  backend->keep_until_the_end(std::move(hook));
}

void unhealthy_as_gloo(const c10::intrusive_ptr<c10d::ProcessGroup>& pg) {
  pg->getBackend(c10::kCPU)->registerAbortHook(
      kHealthHook, [] { c10d::HealthCheck::get()->setUnhealthy(c10d::kDefaultFRBackend); });
}
#endif

void define_gloos_name([[maybe_unused]] torch::Library& library) {
#if TORCH_VERSION_MINOR == 15
  library.def(
      "known_as_gloo(__torch__.torch.classes.c10d.ProcessGroup pg, int[] global_ranks) -> ()",
      known_as_gloo);
  library.def("unhealthy_as_gloo(__torch__.torch.classes.c10d.ProcessGroup pg) -> ()",
              unhealthy_as_gloo);
#endif
}

}  // namespace unisono
