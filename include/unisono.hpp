// unisono for C++17: what unisono.h has, with owners, views, exceptions and something to wait on.
//
//   auto comm = unisono::Communicator::from_environment();
//   std::vector<float> x(1024, 1.0F);
//   comm.all_reduce(x, UNISONO_SUM);                       // blocks
//   auto work = comm.async().all_reduce(x, UNISONO_SUM);   // goes on
//   work.wait();
//
// Header only; it adds nothing to the ABI. The rules of unisono.h for order, threads and buffers
// hold here. Whatever is contiguous and has data() and size() is a buffer (vector, array, string,
// span, a C array, a View of memory of your own); its elements are those of dtype_of, which you may
// add to. Sizes are checked against each other. Every failure is thrown as an Error.
#ifndef UNISONO_HPP
#define UNISONO_HPP

#include <unisono.h>
#include <unisono/buffers.hpp>
#include <unisono/communicator.hpp>
#include <unisono/errors.hpp>
#include <unisono/operations.hpp>
#include <unisono/options.hpp>
#include <unisono/store.hpp>
#include <unisono/window.hpp>
#include <unisono/work.hpp>

#endif
