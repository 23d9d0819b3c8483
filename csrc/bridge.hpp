// The functions and classes of the C++ side that Rust may call. Free of torch, so that the code cxx
// generates compiles without torch's headers; work.hpp and attach.cpp implement these classes.
#pragma once

#include <cstdint>
#include <string>

#include "rust/cxx.h"

namespace unisono {

struct Status;
struct Fetched;
struct StorePlace;

// Told once, from a thread made for that, how an operation ended.
class Completion {
 public:
  virtual ~Completion() = default;
  virtual void finish(const Status& status) noexcept = 0;
};

// Keeps memory that the core uses; destroyed when that is over, by whichever thread learns of it.
class Keeper {
 public:
  virtual ~Keeper() = default;
};

// The key-value store through which the ranks of a group find each other.
class Store {
 public:
  virtual ~Store() = default;
  virtual Status set(rust::Str key, rust::Slice<const uint8_t> value) const noexcept = 0;
  virtual Fetched wait(rust::Str key, uint64_t timeout_ms) const noexcept = 0;
  virtual Fetched fetch(rust::Str key) const noexcept = 0;
  // Where it is and how long it lasts.
  virtual StorePlace place() const noexcept = 0;
};

// The torch this was compiled for, such as "2.15".
rust::String torch_version() noexcept;

// Closes every group that is still alive, so that no thread of theirs needs the interpreter later.
void close_all() noexcept;

}  // namespace unisono
