// Counts numbers into buckets, batch by batch: while the counts of one batch are summed over the
// ranks, each rank counts the next.
//
//   unisono launch -n 4 ./histogram
//
// The result is compared with the same counting on one rank.
#include <algorithm>
#include <array>
#include <cstdint>
#include <iostream>
#include <random>
#include <unisono.hpp>
#include <vector>

namespace {

constexpr int kBatches = 20;
constexpr int kNumbers = 50000;
constexpr std::size_t kBuckets = 4096;

// In memory that the other ranks of the host read where it lies.
using Counts = std::vector<std::int64_t, unisono::Allocator<std::int64_t>>;

// Counts the numbers of `batch` of `rank`, into `counts`, which are all zero.
void count(int rank, int batch, Counts& counts) {
  std::mt19937_64 random(static_cast<std::uint64_t>(rank * kBatches + batch));
  for (int i = 0; i < kNumbers; i++) {
    // The smaller of two: small numbers are more frequent.
    counts[std::min(random() % kBuckets, random() % kBuckets)]++;
  }
}

void add(Counts& total, const Counts& counts) {
  for (std::size_t i = 0; i < kBuckets; i++) total[i] += counts[i];
}

// The counts of all batches of all ranks.
Counts together(const unisono::Communicator& comm) {
  Counts total(kBuckets);
  // Declared before the operation that uses them: a Work waits for its end when it goes.
  std::array<Counts, 2> counts = {Counts(kBuckets), Counts(kBuckets)};
  unisono::Work summing;
  for (int batch = 0; batch < kBatches; batch++) {
    Counts& now = counts[batch % 2];
    Counts& before = counts[(batch + 1) % 2];
    now.assign(kBuckets, 0);
    count(comm.rank(), batch, now);
    if (summing.valid()) {
      summing.wait();
      add(total, before);
    }
    summing = comm.async().all_reduce(now, UNISONO_SUM);
  }
  summing.wait();
  add(total, counts[(kBatches - 1) % 2]);
  return total;
}

Counts alone(int ranks) {
  Counts total(kBuckets);
  for (int rank = 0; rank < ranks; rank++) {
    for (int batch = 0; batch < kBatches; batch++) count(rank, batch, total);
  }
  return total;
}

}  // namespace

int main() try {
  const auto comm = unisono::Communicator::from_environment();
  const Counts total = together(comm);
  if (comm.rank() != 0) return 0;

  const bool right = total == alone(comm.size());
  std::cout << "rank 0: " << comm.size() << " ranks counted "
            << std::int64_t{kBatches} * kNumbers * comm.size() << " numbers "
            << (right ? "as one would" : "otherwise than one would: WRONG") << '\n';
  return right ? 0 : 1;
} catch (const unisono::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
