// How a Python exception gets through C++ to torch's bindings.
//
// They know a class `python_error`, and set the Python exception that one holds as it is. torch
// declares it in a header that needs Python's and pybind11's own, which differ between versions of
// Python. C++ finds the handler of an exception by the name of its class, and torch's handlers read
// these members alone; so this is that class again, and a test raises one of it in every torch.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "unisono/src/bridge.rs.h"

struct python_error : public std::exception {
  explicit python_error(unisono::Raised&& raised)
      : type(object(raised.class_)),
        value(object(raised.value)),
        traceback(object(raised.traceback)),
        message(raised.message) {}
  python_error(python_error&& other) noexcept
      : type(std::exchange(other.type, nullptr)),
        value(std::exchange(other.value, nullptr)),
        traceback(std::exchange(other.traceback, nullptr)),
        message(std::move(other.message)) {}
  python_error& operator=(python_error&&) = delete;
  ~python_error() override {
    for (void* held : {type, value, traceback}) {
      if (held) unisono::give_up(reinterpret_cast<size_t>(held));
    }
  }

  const char* what() const noexcept override { return message.c_str(); }

  // Each a reference to a Python object, which it owns, or null.
  void* type;
  void* value;
  void* traceback;
  std::string message;

 private:
  static void* object(size_t address) { return reinterpret_cast<void*>(address); }
};
