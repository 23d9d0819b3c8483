// The groups that are alive, so that they can be closed before the interpreter goes.
#pragma once

#include <memory>

#include "work.hpp"

namespace unisono {

void remember(const std::shared_ptr<Handle>& handle);

}  // namespace unisono
