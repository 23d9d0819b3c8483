// How groups are joined, and those that are alive, so that they can be closed before the
// interpreter goes.
#pragma once

#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend.hpp"

namespace unisono {

// A list of this process's, with a lock. A forked child has one of its own: its parent's has things
// that are not the child's, and a lock that a thread of the parent may have held. Leaked: it may be
// needed after static objects are gone.
template <typename List>
List& of_this_process() {
  struct Owned {
    const pid_t owner = ::getpid();
    List list;
  };
  static std::atomic<Owned*> instance = nullptr;
  Owned* known = instance.load();
  if (known != nullptr && known->owner == ::getpid()) return known->list;
  auto* made = new Owned;
  if (instance.compare_exchange_strong(known, made)) return made->list;
  // Another thread was faster.
  delete made;
  return known->list;
}

void remember(const std::shared_ptr<Handle>& handle);

// Joins the group whose ranks meet through `store`.
c10::intrusive_ptr<Backend> join_group(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                       int size, c10::intrusive_ptr<c10d::Backend::Options> options,
                                       std::vector<Setting> settings);

// The backend of a group, if it is unisono's: one object serves all its kinds of devices.
Backend* backend_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// The collectives as operators (operators.cpp).
void define_operators(torch::Library& library);
// Functions that put gloo's name in the place of ours (gloos_name.cpp).
void define_gloos_name(torch::Library& library);

}  // namespace unisono
