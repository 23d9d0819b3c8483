// The smallest program that does something, in C++: every rank has numbers, and gets the sums.
//
//   unisono launch -n 4 ./hello
#include <iostream>
#include <sstream>
#include <unisono.hpp>
#include <vector>

int main() try {
  const auto comm = unisono::Communicator::from_environment();

  std::vector<float> numbers(4, static_cast<float>(comm.rank() + 1));
  comm.all_reduce(numbers, UNISONO_SUM);

  const auto expected = static_cast<float>(comm.size() * (comm.size() + 1) / 2);
  const bool right = numbers == std::vector<float>(4, expected);
  // In one piece, since the ranks print side by side.
  std::ostringstream line;
  line << "rank " << comm.rank() << " of " << comm.size() << ": the sums are " << numbers[0]
       << (right ? "\n" : ", which is wrong\n");
  std::cout << line.str();
  return right ? 0 : 1;
} catch (const unisono::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
