// How groups are joined, and those that are alive, so that they can be closed before the
// interpreter goes.
#pragma once

#include <torch/library.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend.hpp"

namespace unisono {

void remember(const std::shared_ptr<Handle>& handle);

// Joins the group whose ranks meet through `store`.
c10::intrusive_ptr<Backend> join_group(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                       int size, c10::intrusive_ptr<c10d::Backend::Options> options,
                                       std::vector<Setting> settings);

// The collectives as operators (operators.cpp).
void define_operators(torch::Library& library);
// Functions that put gloo's name in the place of ours (gloos_name.cpp).
void define_gloos_name(torch::Library& library);

}  // namespace unisono
